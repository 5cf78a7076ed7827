"""TRL patches: the reference of DPO, KTO, GRPO and RLOO.

The reference of an adapter that adds nothing yet is the model without adapters.

DPO, KTO, GRPO and RLOO that get a model with an adapter copy it to a second one, `ref`, and switch to it for the
reference pass. If the adapter is new, its B is zero, and so is the copy: without adapters the model computes the same.
Then our layers run that pass over the frozen weights alone, where they run another adapter layer by layer, unfused, and
the copy's memory is free. A copy of a trained adapter is kept, until the next trainer makes its own: TRL alone fails
there.

The reference of a full fine-tune is loaded by TRL from the model's folder: if our loader has scaled the model's RoPE,
the reference gets the same, or the two would differ before the first step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.causal_lm import FastCausalLM, fast_model

logger = log.get(__name__)

_COPY, _OWN = "ref", "default"
"""TRL's names of both adapters."""
_FURTHER_WEIGHTS = (
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "use_dora",
    "alora_invocation_tokens",
)
"""Options of an adapter with more than A and B, which may change the model even if B is zero."""


def _with_right_reference(init: Callable[..., None]) -> Callable[..., None]:
    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def init_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
        _remove_earlier_copy(args[0] if args else kwargs.get("model"))
        init(self, *args, **kwargs)
        model = getattr(self, "model", None)
        fast = fast_model(model)
        positional = dict(zip(names, (self, *args), strict=False))
        if {**positional, **kwargs}.get("ref_model") is None:
            _scale_rope(self, fast)
        if not isinstance(model, PeftModel) or fast is None or _COPY not in model.peft_config:
            return
        if not _adds_nothing(model):
            logger.info("the reference is a copy of the trained adapter: its pass runs unfused")
            fast.has_reference_copy = True
            return
        model.delete_adapter(_COPY)
        logger.info("the adapter is new, so the reference is the model without adapters, as with peft_config")

    return init_trainer


def _scale_rope(trainer: Any, fast: FastCausalLM | None) -> None:
    """Give the reference that TRL has loaded the RoPE of the model."""
    reference = getattr(trainer, "ref_model", None)
    if reference is None or fast is None or fast.rope is None:
        return
    if not fast.rope.apply_to_built(trainer.accelerator.unwrap_model(reference)):
        raise UnsupportedModelError(
            f"{type(trainer).__name__} loads a reference whose RoPE cannot be scaled as that of the model.",
            fix="Train adapters (get_peft_model), or load the model with a max_seq_length within its positions.",
        )
    logger.info("the reference gets the scaled RoPE of the model")


def _remove_earlier_copy(model: Any) -> None:
    """Remove the copy that an earlier trainer of this model has made; an adapter that the script calls so is left."""
    fast = fast_model(model)
    if fast is None or not fast.has_reference_copy:
        return
    fast.has_reference_copy = False
    if isinstance(model, PeftModel) and _COPY in model.peft_config:
        model.delete_adapter(_COPY)
        logger.warning("an earlier trainer's reference is removed, so that trainer can no longer be used")


def _adds_nothing(model: PeftModel) -> bool:
    """Return whether both adapters have the same effect as none: every B is zero, and there is nothing else."""
    config = model.peft_config[_OWN]
    if type(config) is not LoraConfig or config.bias != "none":
        return False
    if any(getattr(config, option, None) for option in _FURTHER_WEIGHTS):
        return False
    ups = [p for name, p in model.named_parameters() if "lora_B." in name or "lora_embedding_B." in name]
    return bool(ups) and not bool(torch.stack(torch._foreach_norm([up.detach() for up in ups], torch.inf)).any())


def _reference_of(trainer: str) -> LibraryPatch:
    return LibraryPatch(
        library="trl",
        versions=">=1.15,<1.17",
        module=f"trl.trainer.{trainer.lower()}_trainer",
        class_name=f"{trainer}Trainer",
        name="__init__",
        make=_with_right_reference,
        fallback="the reference pass runs unfused, with a copy of the adapter",
        required=False,
    )


REFERENCES = tuple(map(_reference_of, ("DPO", "KTO", "GRPO", "RLOO")))
