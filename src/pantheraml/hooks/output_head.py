"""TRL patches: trainers use our models' own output head.

SFT, DPO, KTO, GRPO and RLOO pass their model to `add_fused_lm_head`, which sets a `forward` that accepts
`fused_lm_head=True` and returns token log-probabilities without full logits. Our models accept that argument
themselves, and compute the gradient in forward where TRL's head recomputes the logits in backward; over fp8 weights,
both matmuls of the head are fp8.

TRL's head remains where ours lacks something: the gradient of the entropy (GRPO's entropy bonus), WPO's weights, a head
in float32, a temperature with a bias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pantheraml.base import log
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.causal_lm import FastCausalLM, fast_model
from pantheraml.models.classifier import refuse_causal_trainer

logger = log.get(__name__)

_SUPPORTED_OUTPUTS = {"log_probs", "entropy", "is_top1", "mean_logits"}


def _unless_built_in(
    trainer: str, scores_no_padding: bool, add_fused_lm_head: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(add_fused_lm_head)
    def add(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        refuse_causal_trainer(model, f"{trainer.upper()}Trainer")
        if not isinstance(model, FastCausalLM):
            add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)
            return
        model.remove_foreign_head()
        reason = _why_not_ours(model, temperature, cast_lm_head_to_fp32, outputs)
        if reason is None:
            model.score_temperature, model.scores_no_padding = temperature, scores_no_padding
            return
        logger.info("TRL's own fused head is used: %s", reason)
        add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)
        model.keep_foreign_head()

    return add


def _why_not_ours(model: FastCausalLM, temperature: float, in_float32: bool, outputs: tuple[str, ...]) -> str | None:
    if model.has_foreign_head():
        return "an earlier trainer's head is in place, and wrapped"
    if in_float32:
        return "cast_lm_head_to_fp32=True"
    further = sorted(set(outputs) - _SUPPORTED_OUTPUTS)
    if further:
        return f"the trainer needs {', '.join(further)}"
    reason = model.why_full_logits()
    if reason is None and temperature != 1.0 and model.has_head_bias():
        return f"temperature={temperature:g}, and the output head has a bias"
    return reason


def _differentiable_entropy(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_grpo(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        model = fast_model(self.model)
        if self._entropy_bonus_enabled and model is not None and not model.has_foreign_head():
            import trl.trainer.utils as trl_utils

            logger.info("TRL's own fused head is used: the entropy bonus needs the gradient of the entropy")
            trl_utils.add_fused_lm_head(model, temperature=self.temperature, outputs=("log_probs", "entropy"))
            model.keep_foreign_head()

    return init_grpo


def _head_of(trainer: str, *, scores_no_padding: bool) -> LibraryPatch:
    """`scores_no_padding`: the trainer makes the labels itself, and none where its mask is 0."""
    return LibraryPatch(
        library="trl",
        versions=">=1.15,<1.17",
        module=f"trl.trainer.{trainer}_trainer",
        name="add_fused_lm_head",
        make=functools.partial(_unless_built_in, trainer, scores_no_padding),
        fallback=f"{trainer.upper()}Trainer uses its own fused head, which is correct but computes the logits twice",
    )


SFT_HEAD = _head_of("sft", scores_no_padding=False)  # labels come with the data
HEADS = tuple(_head_of(trainer, scores_no_padding=True) for trainer in ("dpo", "kto", "grpo", "rloo"))
ENTROPY_BONUS = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.grpo_trainer",
    class_name="GRPOTrainer",
    name="__init__",
    make=_differentiable_entropy,
    fallback="GRPOTrainer uses its own fused head, whose entropy has a gradient",
)
