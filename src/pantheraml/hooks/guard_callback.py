"""The guard for trainers of transformers and TRL: a callback that judges and clips gradients before every step.

It takes clipping over from the trainer, and answers gradients that are not finite, or jump, by the engine's policy. A
callback cannot run a step again, nor does it see the loss: there is no retry and no loss spike. By the time it is asked
the trainer has multiplied all gradients by the norm's NaN, so values are made 0 when they arrive, where that is the
answer. Rolling back is to copies in memory, and the trainer's data and schedule go on.
Every process must hold the whole model: all then have the same gradients, and decide alike without a word (but for
values that were made 0, which are a process's own, and told in one small exchange a step).
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
from pantheraml.engine.guard.arrival import ZeroOnArrival
from pantheraml.engine.guard.own_loop import OwnLoopGuard, stopped, trained_parameters
from pantheraml.engine.guard.snapshots import Snapshots
from pantheraml.engine.guard.verdict import Verdict, first_nonfinite
from pantheraml.parallel.process_group import World, joined_world
from pantheraml.specs.train import StabilityConfig

logger = log.get(__name__)

NOT_HERE = ("debug", "update_ratio_every", "group_norms_every", "spike_warmup_steps")
"""Keys for what a callback has no place to tell, or of the loss, which it does not see."""


class GuardCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not typed
    """`SFTTrainer(..., callbacks=[GuardCallback(clipping="zclip", on_nonfinite="skip")])`: keys of `stability`."""

    def __init__(self, **settings: Any) -> None:
        try:
            self._config = StabilityConfig(**settings)
        except ValidationError as err:
            wrong = "; ".join(f"{detail['loc'][0]}={detail['input']!r}: {detail['msg']}" for detail in err.errors())
            raise ConfigError(f"GuardCallback cannot take {wrong}.", todo="docs/stability.md lists its keys.") from err
        for name in NOT_HERE:
            asked = getattr(self._config, name)
            if asked not in (0, StabilityConfig.model_fields[name].default):
                raise ConfigError(
                    f"A trainer's callback cannot do {name}={asked}.",
                    todo=f"Leave {name} out, or train with `pantheraml train`.",
                )
        self._guard: OwnLoopGuard | None = None
        self._arrival: ZeroOnArrival | None = None
        self._snapshots: Snapshots | None = None
        self._clips_for: TrainingArguments | None = None
        self._max_grad_norm = 0.0
        """What `_clips_for` said, which says 0 meanwhile."""
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
        if args.deepspeed or args.fsdp:
            raise ConfigError(
                "GuardCallback is for models that every process holds whole.",
                todo="Train without DeepSpeed and FSDP, or with `pantheraml train`, whose guard knows FSDP.",
            )
        self._begin_anew(given["model"])
        if self._clips_for is not args:  # else a training by them was broken off
            self._clips_for, self._max_grad_norm = args, args.max_grad_norm
        args.max_grad_norm = 0.0
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step == 0:
            self.learnt = None
        elif isinstance(saved, dict):
            self.learnt = saved["attributes"]["learnt"]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        guard = self._guard = self._guard or self._prepare(given["model"])
        if self._config.rolls_back and self._snapshots is None:
            every = self._config.rollback_steps
            self._snapshots = Snapshots(guard, given["optimizer"], every, step=state.global_step)
        numbers, verdict = guard.judge(None, spoilt=None if self._arrival is None else self._arrival.take())
        if verdict.action == "roll_back":
            verdict = self._roll_back(state.global_step, verdict)
        if verdict.anomaly is not None:
            self._tell(state.global_step + 1, verdict)
        if verdict.action == "stop":
            self._leave(args)
            raise stopped(state.global_step + 1, verdict, settings="GuardCallback")
        if verdict.action in ("skip", "roll_back"):
            guard.drop_gradients()
        else:
            guard.clip(given["optimizer"], guard.zero_nonfinite() if verdict.action == "zero" else numbers.grad_norm)
        groups = given["optimizer"].param_groups
        self._scheduled = [group["lr"] for group in groups]
        for group in groups if verdict.rate_factor != 1.0 else ():
            group["lr"] = group["lr"] * verdict.rate_factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        for group, rate in zip(given["optimizer"].param_groups, self._scheduled, strict=True):
            group["lr"] = rate
        if self._snapshots is not None:
            self._snapshots.after(state.global_step + 1)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._leave(args)
        broken = first_nonfinite(trained_parameters(given["model"]))
        if broken is not None:
            raise NonFiniteError(
                f"After step {state.global_step} the weights are not finite (first: {broken}).",
                todo="Do not use them: go back to an earlier checkpoint, and train on with on_nonfinite='skip'.",
            )

    def _begin_anew(self, model: nn.Module) -> None:
        """An earlier training may have been of another model."""
        self._let_go()
        self._guard = None
        if self._config.on_nonfinite == "zero":
            self._arrival = ZeroOnArrival(trained_parameters(model))

    def _leave(self, args: TrainingArguments) -> None:
        """Trainer and model are again as they were given."""
        self._let_go()
        self._clips_for, args.max_grad_norm = None, self._max_grad_norm

    def _let_go(self) -> None:
        if self._arrival is not None:
            self._arrival.remove()
        self._arrival = self._snapshots = None

    def _prepare(self, model: nn.Module) -> OwnLoopGuard:
        device = next(model.parameters()).device
        peers = World(rank=0, size=1, device=device) if self._arrival is None else joined_world(device)
        guard = OwnLoopGuard(self._config, self._max_grad_norm, model, peers)
        if self.learnt is not None:
            guard.from_state(self.learnt)
        return guard

    def _roll_back(self, step: int, verdict: Verdict) -> Verdict:
        """`verdict`, with what became of it: `step` is the last one before."""
        reached = None if self._snapshots is None else self._snapshots.roll_back(step)
        if reached is None:
            return replace(
                verdict, action="stop", cause=f"{verdict.cause}, and no weights to roll back to are old enough"
            )
        return replace(verdict, cause=f"{verdict.cause}; back to the weights of step {reached}")

    def _tell(self, step: int, verdict: Verdict) -> None:
        self.verdicts.append((step, verdict))
        logger.warning("step %s: %s (%s)", step, verdict.action, verdict.cause)
