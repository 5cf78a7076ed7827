"""Weights & Biases. Its own settings decide where the run goes (`wandb login`, `WANDB_MODE=offline`, ...)."""

from __future__ import annotations

import uuid

from pantheraml.base.errors import ConfigError
from pantheraml.readers.sinks.sink import Backend, RunIdentity, register, require


class WeightsAndBiases:
    def __init__(self, identity: RunIdentity) -> None:
        wandb = require("wandb", extra="wandb")
        if (own := identity.run_dir / "wandb" / "settings").exists():
            # W&B reads it where the command is started in the run folder, and would send the key to any server
            raise ConfigError(
                "The run folder has settings of its own for Weights & Biases, which are not obeyed.",
                where=str(own),
                todo="Remove that file; your own settings belong into ~/.config/wandb or the environment.",
            )
        known_as = identity.remembered("wandb") or uuid.uuid4().hex[:12]
        # The console belongs to the progress bar: W&B neither captures nor writes it.
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project=identity.project, id=known_as, name=identity.name, dir=str(identity.run_dir),
                config=identity.config, resume="allow", settings=settings,
            )  # fmt: skip
        except wandb.errors.Error as err:
            raise ConfigError(
                f"Weights & Biases did not open a run: {err}",
                where="report.sinks",
                todo="Run `wandb login`, or set WANDB_MODE=offline to keep the metrics on this machine.",
            ) from err
        identity.remember("wandb", known_as)
        # A resumed run repeats steps, which W&B's own step counter forbids; an axis of our own allows it.
        for group in ("train/*", "eval/*"):
            self._run.define_metric(group, step_metric="step")

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        del seconds  # W&B stamps what it receives with its own clock
        self._run.log({"step": step, **metrics})

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "succeeded" else 1)


@register("wandb")
def _open(identity: RunIdentity) -> Backend:
    return WeightsAndBiases(identity)
