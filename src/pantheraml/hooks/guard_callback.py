"""The guard for trainers of transformers and TRL: a callback that judges and clips gradients before every step.

It takes clipping over from the trainer, and answers gradients that are not finite, or jump, by the engine's policy. A
callback cannot run a step again, nor does it see the loss; so there is no retry, no roll back and no loss spike. And by
the time it is asked, the trainer has multiplied all gradients by the norm's NaN: where that came from cannot be told.
Every process must hold the whole model: all then have the same gradients, and decide alike without a word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, NonFiniteError, TrainingError
from pantheraml.engine.guard.clipping import Clipping, build_clipping
from pantheraml.engine.guard.norms import Spread
from pantheraml.engine.guard.policy import Policy
from pantheraml.engine.guard.verdict import StepNumbers, Verdict, first_nonfinite
from pantheraml.specs.train import StabilityConfig

logger = log.get(__name__)

NOT_HERE = ("zero", "lower_rate", "roll_back")
"""Answers that a callback cannot give."""


class GuardCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is not typed
    """`SFTTrainer(..., callbacks=[GuardCallback(clipping="zclip", on_nonfinite="skip")])`: keys of `stability`."""

    def __init__(self, **settings: Any) -> None:
        self._config = StabilityConfig(**settings)
        for name in ("on_nonfinite", "on_spike"):
            if getattr(self._config, name) in NOT_HERE:
                raise ConfigError(
                    f"A trainer's callback cannot do {name}={getattr(self._config, name)}.",
                    todo="Use stop, skip or detect, or train with `pantheraml train`.",
                )
        self._policy = Policy(self._config)
        self._parts: tuple[Spread, Clipping] | None = None
        self._max_grad_norm = 0.0
        self.learnt: Mapping[str, Any] | None = None
        """What a run that is resumed had learnt of norms."""
        self.verdicts: list[tuple[int, Verdict]] = []
        """Steps that were not in order, and what was decided."""

    def state(self) -> dict[str, Any]:
        learnt = self.learnt
        if self._parts is not None:
            learnt = {"policy": self._policy.to_state(), "clipping": self._parts[1].to_state()}
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
        spread, clipping = self._parts = self._parts or self._prepare(given["model"])
        norm = float(spread.share(spread.gradients()).sqrt())
        numbers = StepNumbers(loss_sums=[0.0], grad_norm=norm, target_tokens=1, stop_requested=False)
        verdict = self._policy.decide(numbers, loss_scale=None)
        if verdict.anomaly is not None:
            self._tell(state.global_step + 1, verdict)
        if verdict.action == "stop":
            raise _stopped(state.global_step + 1, verdict)
        if verdict.action == "skip":
            for _, part in spread.parts:
                part.grad = None  # which the optimizer then leaves alone
            return
        if math.isfinite(norm):
            clipping.clip(given["optimizer"], norm)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        args.max_grad_norm = self._max_grad_norm
        broken = first_nonfinite(_trained(given["model"]))
        if broken is not None:
            raise NonFiniteError(
                f"After step {state.global_step} the weights are not finite (first: {broken}).",
                todo="Do not use them: go back to an earlier checkpoint, and train on with on_nonfinite='skip'.",
            )

    def _prepare(self, model: nn.Module) -> tuple[Spread, Clipping]:
        parameters = _trained(model)
        if any(isinstance(parameter, DTensor) for _, parameter in parameters):
            raise ConfigError(
                "GuardCallback is for models that every process holds whole.",
                todo="Train without FSDP and tensor parallelism, or with `pantheraml train`, whose guard knows them.",
            )
        spread = Spread(parameters, parameters)
        clipping = build_clipping(self._config, self._max_grad_norm, spread)
        if self.learnt is not None:
            self._policy.from_state(self.learnt["policy"])
            clipping.from_state(self.learnt["clipping"])
        return spread, clipping

    def _tell(self, step: int, verdict: Verdict) -> None:
        self.verdicts.append((step, verdict))
        logger.warning("step %s: %s (%s)", step, verdict.action, verdict.cause)


def _stopped(step: int, verdict: Verdict) -> TrainingError:
    kind = NonFiniteError if verdict.anomaly == "nonfinite" else TrainingError
    return kind(
        f"Training stopped at step {step}: {verdict.cause}.",
        todo="Lower the learning rate, or give GuardCallback on_nonfinite='skip' or on_spike='skip'. The weights are"
        " those before that step.",
    )


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
