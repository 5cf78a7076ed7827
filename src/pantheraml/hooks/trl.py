"""TRL patches: `SFTTrainer` uses our models' own output head.

`SFTTrainer` passes its model to `add_fused_lm_head`, which sets a `forward` that accepts `fused_lm_head=True` and
returns token log-probabilities without full logits. Our models accept that argument themselves, and compute the
gradient in forward where TRL's head recomputes the logits in backward.

Its collator turns each list of tokens into a tensor, number by number, while the GPU waits for the batch: 3 to 4 ms for
8,192 tokens with labels, 5 % of a step of a 1B model (H200). Passed as arrays, they give the same tensors.

TRL before 1.16 also warns of cross-document attention in packed batches, unless it knows the attention by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pantheraml.base import log
from pantheraml.hooks.async_metrics import ASYNC_GRAD_NORM
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.old_trl_configs import BATCHED_FORMATTING, OLD_CONFIGS, OLD_PLACES, revert_experimental
from pantheraml.hooks.optimizers import OWN_ADAMW
from pantheraml.hooks.prefetch_batches import ANNOUNCE_NEXT_BATCH, PREFETCH_BATCHES
from pantheraml.hooks.registry import REGISTRY
from pantheraml.hooks.sft_length import CONFIG_LENGTH, TRAINER_LENGTH
from pantheraml.hooks.trainer_checks import ONE_GPU, REQUIRE_TRAINABLE, REWARD_MODEL
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION
from pantheraml.models.causal_lm import FastCausalLM

logger = log.get(__name__)

_SUPPORTED_OUTPUTS = {"log_probs", "entropy", "is_top1"}


def _unless_built_in(add_fused_lm_head: Callable[..., None]) -> Callable[..., None]:
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
            and set(outputs) <= _SUPPORTED_OUTPUTS
        ):
            reason = model.why_full_logits()
            if reason is None:
                return
            logger.info("TRL's own fused head is used: %s", reason)
        add_fused_lm_head(model, temperature, cast_lm_head_to_fp32, outputs)

    return add


def _with_arrays(torch_call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torch_call)
    def call(self: Any, examples: list[dict[str, Any]]) -> Any:
        return torch_call(self, [{**example, **_arrays(example)} for example in examples])

    return call


def _arrays(example: dict[str, Any]) -> dict[str, Any]:
    """Return the token columns that are lists of integers, as arrays."""
    arrays = {}
    for name in ("input_ids", "labels"):
        values = example.get(name)
        if type(values) is list and values:
            array = np.array(values)
            if array.dtype == np.int64 and array.ndim == 1:
                arrays[name] = array
    return arrays


def _with_document_attention(names: set[str]) -> set[str]:
    return {*names, DOCUMENT_ATTENTION}


SFT_HEAD = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_trainer",
    name="add_fused_lm_head",
    make=_unless_built_in,
    fallback="SFTTrainer uses its own fused head, which is correct but computes the logits twice",
)
COLLATOR = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_trainer",
    class_name="DataCollatorForLanguageModeling",
    name="torch_call",
    make=_with_arrays,
    fallback="its collator takes a few milliseconds longer per batch",
    required=False,
)
PACKING_ATTENTION = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.16",
    module="trl.trainer.sft_trainer",
    name="FLASH_ATTENTION_VARIANTS",
    make=_with_document_attention,
    fallback="",  # later versions have no such list
)


_ALL = (
    SFT_HEAD, COLLATOR, PACKING_ATTENTION, CONFIG_LENGTH, TRAINER_LENGTH,
    PREFETCH_BATCHES, ASYNC_GRAD_NORM, ANNOUNCE_NEXT_BATCH, REQUIRE_TRAINABLE, ONE_GPU, REWARD_MODEL,
    OWN_ADAMW, OLD_PLACES, BATCHED_FORMATTING, *OLD_CONFIGS,
)  # fmt: skip


def apply() -> None:
    """Apply the patches that `FastLanguageModel` needs, to TRL if it is installed and to the trainer it builds on."""
    for patch in _ALL:
        REGISTRY.apply(patch)


def revert() -> None:
    for patch in _ALL:
        REGISTRY.revert(patch)
    revert_experimental()
