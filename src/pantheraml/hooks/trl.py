"""The patches that `FastLanguageModel` applies, and those of `SFTTrainer`'s data.

`SFTTrainer`'s collator turns each list of tokens into a tensor, number by number, while the GPU waits for the batch: 3
to 4 ms for 8,192 tokens with labels, 5 % of a step of a 1B model (H200). Passed as arrays, they give the same tensors.

TRL before 1.16 also warns of cross-document attention in packed batches, unless it knows the attention by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from pantheraml.hooks.async_metrics import ASYNC_GRAD_NORM
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.old_trl_configs import OLD_CONFIGS, OLD_PLACES, revert_experimental
from pantheraml.hooks.optimizers import OWN_ADAMW
from pantheraml.hooks.orpo import ORPO_HEAD
from pantheraml.hooks.output_head import ENTROPY_BONUS, HEADS, SFT_HEAD
from pantheraml.hooks.prefetch_batches import PREFETCH_BATCHES
from pantheraml.hooks.reference_adapter import REFERENCES
from pantheraml.hooks.registry import REGISTRY
from pantheraml.hooks.sft_length import CONFIG_LENGTH, TRAINER_LENGTH
from pantheraml.hooks.sft_texts import SFT_TEXTS
from pantheraml.hooks.trainer_checks import ONE_GPU, REQUIRE_TRAINABLE, REWARD_MODEL
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION


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
    PREFETCH_BATCHES, ASYNC_GRAD_NORM, REQUIRE_TRAINABLE, ONE_GPU, REWARD_MODEL,
    OWN_ADAMW, OLD_PLACES, SFT_TEXTS, *OLD_CONFIGS, *HEADS, ENTROPY_BONUS, *REFERENCES,
)  # fmt: skip


_BEFORE_A_MODEL = (CONFIG_LENGTH, OLD_PLACES, *OLD_CONFIGS)
"""Patches that are needed from the import of TRL on: scripts import trainers, and make configs, before they load."""


def apply_on_import() -> None:
    """Translate old names as soon as TRL is imported, and note what its configs leave out. Imports nothing itself."""
    for patch in _BEFORE_A_MODEL:
        if patch.is_supported():
            REGISTRY.apply_on_import(patch)


def apply() -> None:
    """Apply the patches that `FastLanguageModel` needs, to TRL if it is installed and to the trainer it builds on."""
    for patch in _ALL:
        REGISTRY.apply(patch)
    if ORPO_HEAD.is_supported():  # few scripts import experimental trainers
        REGISTRY.apply_on_import(ORPO_HEAD)


def revert() -> None:
    for patch in (*_ALL, ORPO_HEAD):
        REGISTRY.revert(patch)
    revert_experimental()
