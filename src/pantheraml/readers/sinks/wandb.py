"""Weights & Biases, configured by its own settings (`wandb login`, `WANDB_MODE=offline`, ...)."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from pantheraml.base.errors import ConfigError
from pantheraml.readers.sinks.sink import Backend, RunIdentity, register, require


class WeightsAndBiases:
    def __init__(self, identity: RunIdentity) -> None:
        for folder in (Path.cwd(), identity.run_dir):
            _refuse_settings(folder)
        wandb = require("wandb", extra="wandb")
        run_id = identity.recorded_id("wandb") or uuid.uuid4().hex[:12]
        # The console belongs to the progress bar: W&B must neither capture it nor write to it.
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project=identity.project, id=run_id, name=identity.name, dir=str(identity.run_dir),
                config=identity.config, resume="allow", settings=settings,
            )  # fmt: skip
        except wandb.errors.Error as err:
            raise ConfigError(
                f"Weights & Biases could not start a run: {err}",
                where="report.sinks",
                fix="Run `wandb login`, or set WANDB_MODE=offline to keep the metrics local.",
            ) from err
        identity.record_id("wandb", run_id)
        # A resumed run repeats steps, which W&B's own step counter forbids; a custom step metric allows it.
        for group in ("train/*", "eval/*"):
            self._run.define_metric(group, step_metric="step")

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        del seconds  # W&B uses its own timestamps
        self._run.log({"step": step, **metrics})

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "succeeded" else 1)


def _refuse_settings(folder: Path) -> None:
    """Raise if `folder` has W&B settings. W&B reads those of the current folder before the environment, would send the
    API key to any server that they name, and has no option against it. Someone else may have made the folder."""
    for name in ("wandb", ".wandb"):
        if os.path.lexists(own := folder / name / "settings"):
            raise ConfigError(
                "The folder has settings of its own for Weights & Biases, which are not used.",
                where=str(own),
                fix="Start the command in another folder, or remove that file: your own settings belong in"
                " ~/.config/wandb/settings or the environment (WANDB_ENTITY, WANDB_BASE_URL).",
            )


@register("wandb")
def _open(identity: RunIdentity) -> Backend:
    return WeightsAndBiases(identity)
