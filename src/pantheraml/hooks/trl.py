"""TRL: our models answer its `SFTTrainer` with their own output head.

`SFTTrainer` hands its model to `add_fused_lm_head`, which sets a `forward` on it that knows `fused_lm_head=True` and
gives token log-probabilities without full logits. Our models know that argument by themselves, and form the gradient
in the forward pass where TRL's head computes the logits a second time in the backward pass.

Its collator makes a tensor of each list of tokens, number by number, while the GPU waits for the batch: 3 to 4 ms for
8,192 tokens with labels, 5 % of a step of a 1B model (H200). Handed over as arrays they give the same tensors.

TRL before 1.16 also warns of documents that see each other in packed batches, unless it knows the attention by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pantheraml.base import log
from pantheraml.hooks.batches import STEP_IS_QUEUED, TRAIN_BATCHES
from pantheraml.hooks.logged import GRADIENT_NORM
from pantheraml.hooks.replacement import Replacement
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION
from pantheraml.models.causal_lm import FastCausalLM

logger = log.get(__name__)

_GIVEN = {"log_probs", "entropy", "is_top1"}


def _unless_it_has_one(add_fused_lm_head: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(add_fused_lm_head)
    def add(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        if (
            isinstance(model, FastCausalLM)
            and temperature == 1.0
            and not cast_lm_head_to_fp32
            and set(outputs) <= _GIVEN
        ):
            reason = model.why_full_logits()
            if reason is None:
                return
            logger.info("TRL's own fused head is used: %s", reason)
        add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)

    return add


def _over_arrays(torch_call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torch_call)
    def call(self: Any, examples: list[dict[str, Any]]) -> Any:
        return torch_call(self, [{**example, **_arrays(example)} for example in examples])

    return call


def _arrays(example: dict[str, Any]) -> dict[str, Any]:
    """The columns of tokens that are lists of whole numbers, as arrays."""
    found = {}
    for name in ("input_ids", "labels"):
        values = example.get(name)
        if type(values) is list and values:
            array = np.array(values)
            if array.dtype == np.int64 and array.ndim == 1:
                found[name] = array
    return found


def _with_document_attention(names: set[str]) -> set[str]:
    return {*names, DOCUMENT_ATTENTION}


SFT_HEAD = Replacement(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_trainer",
    name="add_fused_lm_head",
    make=_unless_it_has_one,
    otherwise="SFTTrainer uses its own fused head, which is right but computes the logits twice",
)
COLLATOR = Replacement(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_trainer",
    of_class="DataCollatorForLanguageModeling",
    name="torch_call",
    make=_over_arrays,
    otherwise="its collator takes some milliseconds longer for each batch",
    needed=False,
)
PACKING_ATTENTION = Replacement(
    library="trl",
    versions=">=1.15,<1.16",
    module="trl.trainer.sft_trainer",
    name="FLASH_ATTENTION_VARIANTS",
    make=_with_document_attention,
    otherwise="it has no list of attentions that know documents",
)


_ALL = (SFT_HEAD, COLLATOR, PACKING_ATTENTION, TRAIN_BATCHES, GRADIENT_NORM, STEP_IS_QUEUED)


def apply() -> None:
    """What `FastLanguageModel` needs of TRL, if TRL is installed, and of the trainer that it builds on."""
    for replacement in _ALL:
        replacement.apply()


def revert() -> None:
    for replacement in _ALL:
        replacement.revert()
