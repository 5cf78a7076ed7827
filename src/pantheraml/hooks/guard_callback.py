"""The stability guard for trainers of transformers and TRL: a callback that checks and clips gradients before every
step.

It takes clipping over from the trainer, and handles non-finite gradients and gradient spikes by the engine's policy. A
callback cannot rerun a step and does not see the loss: there is no retry and no loss-spike detection. By the time it is
called, the trainer has multiplied all gradients by the norm's NaN; so with on_nonfinite='zero', values are zeroed by
gradient hooks in backward. Rollback restores copies in memory, while the trainer's data and schedule continue. Every
rank must hold the whole model: all ranks then have the same gradients and decide alike without communication (except
for zeroed values, which differ per rank and are exchanged in one small collective a step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, NonFiniteError
from pantheraml.engine.guard.nan_origin import ZeroNonfiniteGrads
from pantheraml.engine.guard.own_loop import OwnLoopGuard, Snapshots, stop_error, trained_parameters
from pantheraml.engine.guard.policy import Verdict, first_nonfinite
from pantheraml.parallel.process_group import World, world_from_process_group
from pantheraml.specs.section_errors import UNKNOWN, without_fix
from pantheraml.specs.train import StabilityConfig
from pantheraml.specs.unknown_field import fields_hint

logger = log.get(__name__)

UNSUPPORTED_KEYS = ("debug", "update_ratio_every", "group_norms_every", "spike_warmup_steps")
"""Keys for output that a callback has no place for, or for the loss, which it does not see."""


class GuardCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not typed
    """`SFTTrainer(..., callbacks=[GuardCallback(clipping="zclip", on_nonfinite="skip")])`: keys of `stability`."""

    def __init__(self, **settings: Any) -> None:
        try:
            self._config = StabilityConfig(**settings)
        except ValidationError as err:
            details = err.errors()
            problems = "; ".join(f"{one['loc'][0]}={one['input']!r}: {without_fix(one['msg'])}" for one in details)
            unknown = [str(one["loc"][0]) for one in details if one["type"] in UNKNOWN]
            hint = f"{fields_hint(unknown, StabilityConfig.model_fields)} " if unknown else ""
            raise ConfigError(
                f"GuardCallback got invalid settings: {problems}.", fix=f"{hint}See docs/stability.md for its keys."
            ) from err
        for name in UNSUPPORTED_KEYS:
            value = getattr(self._config, name)
            if value not in (0, StabilityConfig.model_fields[name].default):
                raise ConfigError(
                    f"GuardCallback does not support {name}={value}.",
                    fix=f"Remove {name}, or train with `pantheraml train`.",
                )
        self._guard: OwnLoopGuard | None = None
        self._zero_hooks: ZeroNonfiniteGrads | None = None
        self._snapshots: Snapshots | None = None
        self._patched_args: TrainingArguments | None = None
        self._max_grad_norm = 0.0
        """`max_grad_norm` of `_patched_args`, which is 0 during training."""
        self._scheduled_lrs: list[Any] = []
        """Learning rates of the scheduler, while a step uses lower ones."""
        self.learnt: Mapping[str, Any] | None = None
        """Norm statistics of the run being resumed."""
        self.verdicts: list[tuple[int, Verdict]] = []
        """Anomalous steps and their verdicts."""

    def state(self) -> dict[str, Any]:
        learnt = self.learnt if self._guard is None else self._guard.to_state()
        return {"args": self._config.model_dump(), "attributes": {"learnt": learnt}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.fp16:
            raise ConfigError(
                "GuardCallback cannot judge gradients with an fp16 loss scale.", fix="Set bf16=True, or neither."
            )
        if args.deepspeed or args.fsdp:
            raise ConfigError(
                "GuardCallback needs the full model on every rank.",
                fix="Train without DeepSpeed and FSDP, or with `pantheraml train`, whose guard supports FSDP.",
            )
        self._reset(kwargs["model"])
        if self._patched_args is not args:  # otherwise an earlier training with them was interrupted
            self._patched_args, self._max_grad_norm = args, args.max_grad_norm
        args.max_grad_norm = 0.0
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step == 0:
            self.learnt = None
        elif isinstance(saved, dict):
            self.learnt = saved["attributes"]["learnt"]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        guard = self._guard = self._guard or self._prepare(kwargs["model"])
        if self._config.rolls_back and self._snapshots is None:
            every = self._config.rollback_steps
            self._snapshots = Snapshots(guard, kwargs["optimizer"], every, step=state.global_step)
        numbers, verdict = guard.judge(
            None, had_nonfinite=None if self._zero_hooks is None else self._zero_hooks.take()
        )
        if verdict.action == "roll_back":
            verdict = self._roll_back(state.global_step, verdict)
        if verdict.anomaly is not None:
            self._report(state.global_step + 1, verdict)
        if verdict.action == "stop":
            self._restore(args)
            raise stop_error(state.global_step + 1, verdict, settings="GuardCallback")
        if verdict.action in ("skip", "roll_back"):
            guard.drop_gradients()
        else:
            guard.clip(kwargs["optimizer"], guard.zero_nonfinite() if verdict.action == "zero" else numbers.grad_norm)
        groups = kwargs["optimizer"].param_groups
        self._scheduled_lrs = [group["lr"] for group in groups]
        for group in groups if verdict.rate_factor != 1.0 else ():
            group["lr"] = group["lr"] * verdict.rate_factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for group, rate in zip(kwargs["optimizer"].param_groups, self._scheduled_lrs, strict=True):
            group["lr"] = rate
        if self._snapshots is not None:
            self._snapshots.after(state.global_step + 1)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._restore(args)
        bad_parameter = first_nonfinite(trained_parameters(kwargs["model"]))
        if bad_parameter is not None:
            raise NonFiniteError(
                f"After step {state.global_step} the weights are not finite (first: {bad_parameter}).",
                fix="Do not use them: resume from an earlier checkpoint with on_nonfinite='skip'.",
            )

    def _reset(self, model: nn.Module) -> None:
        """Drop the state of an earlier training, which may have been of another model."""
        self._detach()
        self._guard = None
        if self._config.on_nonfinite == "zero":
            self._zero_hooks = ZeroNonfiniteGrads(trained_parameters(model))

    def _restore(self, args: TrainingArguments) -> None:
        """Restore the trainer and the model as they were given."""
        self._detach()
        self._patched_args, args.max_grad_norm = None, self._max_grad_norm

    def _detach(self) -> None:
        if self._zero_hooks is not None:
            self._zero_hooks.remove()
        self._zero_hooks = self._snapshots = None

    def _prepare(self, model: nn.Module) -> OwnLoopGuard:
        device = next(model.parameters()).device
        peers = World(rank=0, size=1, device=device) if self._zero_hooks is None else world_from_process_group(device)
        guard = OwnLoopGuard(self._config, self._max_grad_norm, model, peers)
        if self.learnt is not None:
            guard.from_state(self.learnt)
        return guard

    def _roll_back(self, step: int, verdict: Verdict) -> Verdict:
        """Roll back, and return `verdict` with the outcome; `step` is the last one taken."""
        reached = None if self._snapshots is None else self._snapshots.roll_back(step)
        if reached is None:
            return replace(
                verdict, action="stop", cause=f"{verdict.cause}, and no snapshot is old enough to roll back to"
            )
        return replace(verdict, cause=f"{verdict.cause}; rolled back to the weights of step {reached}")

    def _report(self, step: int, verdict: Verdict) -> None:
        self.verdicts.append((step, verdict))
        logger.warning("step %s: %s (%s)", step, verdict.action, verdict.cause)
