"""The guard for trainers of transformers and TRL: a callback that judges and clips gradients before every step.

It takes clipping over from the trainer, and answers gradients that are not finite, or jump, by the engine's policy. A
callback cannot run a step again, nor does it see the loss; so there is no retry, no roll back and no loss spike. And by
the time it is asked, the trainer has multiplied all gradients by the norm's NaN: where that came from cannot be told,
and nothing is left to be taken with zeros.
Every process must hold the whole model: all then have the same gradients, and decide alike without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, NonFiniteError
from pantheraml.engine.guard.own_loop import OwnLoopGuard, stopped, trained_parameters
from pantheraml.engine.guard.verdict import Verdict, first_nonfinite
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import StabilityConfig

logger = log.get(__name__)

NOT_HERE = ("zero", "roll_back")
"""Answers that a callback cannot give."""


class GuardCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not typed
    """`SFTTrainer(..., callbacks=[GuardCallback(clipping="zclip", on_nonfinite="skip")])`: keys of `stability`."""

    def __init__(self, **settings: Any) -> None:
        self._config = StabilityConfig(**settings)
        for name in ("on_nonfinite", "on_spike"):
            if getattr(self._config, name) in NOT_HERE:
                raise ConfigError(
                    f"A trainer's callback cannot do {name}={getattr(self._config, name)}.",
                    todo="Use stop, skip, lower_rate or detect, or train with `pantheraml train`.",
                )
        self._guard: OwnLoopGuard | None = None
        self._max_grad_norm = 0.0
        self._scheduled: list[Any] = []
        """Learning rates that a schedule has set, while a step is taken with lower ones."""
        self.learnt: Mapping[str, Any] | None = None
        """What a run that is resumed had learnt of norms."""
        self.verdicts: list[tuple[int, Verdict]] = []
        """Steps that were not in order, and what was decided."""

    def state(self) -> dict[str, Any]:
        learnt = self.learnt if self._guard is None else self._guard.to_state()
        return {"args": self._config.model_dump(), "attributes": {"learnt": learnt}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if args.fp16:
            raise ConfigError("GuardCallback sees gradients that fp16 has scaled.", todo="Set bf16=True, or neither.")
        self._max_grad_norm, args.max_grad_norm = args.max_grad_norm, 0.0
        saved = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(saved, dict):
            self.learnt = saved["attributes"]["learnt"]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        guard = self._guard = self._guard or self._prepare(given["model"])
        numbers, verdict = guard.judge(loss=None)
        if verdict.anomaly is not None:
            self._tell(state.global_step + 1, verdict)
        if verdict.action == "stop":
            raise stopped(state.global_step + 1, verdict, settings="GuardCallback")
        if verdict.action == "skip":
            guard.drop_gradients()
        else:
            guard.clip(given["optimizer"], numbers.grad_norm)
        groups = given["optimizer"].param_groups
        self._scheduled = [group["lr"] for group in groups]
        for group in groups if verdict.rate_factor != 1.0 else ():
            group["lr"] = group["lr"] * verdict.rate_factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        for group, rate in zip(given["optimizer"].param_groups, self._scheduled, strict=True):
            group["lr"] = rate

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        args.max_grad_norm = self._max_grad_norm
        broken = first_nonfinite(trained_parameters(given["model"]))
        if broken is not None:
            raise NonFiniteError(
                f"After step {state.global_step} the weights are not finite (first: {broken}).",
                todo="Do not use them: go back to an earlier checkpoint, and train on with on_nonfinite='skip'.",
            )

    def _prepare(self, model: nn.Module) -> OwnLoopGuard:
        alone = World(rank=0, size=1, device=torch.device("cpu"))
        guard = OwnLoopGuard(self._config, self._max_grad_norm, model, alone)
        if self.learnt is not None:
            guard.from_state(self.learnt)
        return guard

    def _tell(self, step: int, verdict: Verdict) -> None:
        self.verdicts.append((step, verdict))
        logger.warning("step %s: %s (%s)", step, verdict.action, verdict.cause)
