"""Embedding and output head of an adapter whose tokenizer has more tokens than its base.

After `resize_token_embeddings`, PEFT saves both matrices with the adapter, beside those of `modules_to_save`:

    base_model.model.model.embed_tokens.weight                     of the base, or the trained copy of `modules_to_save`
    base_model.model.model.embed_tokens.original_module.weight     of the base, if there is a trained copy
    base_model.model.model.embed_tokens.modules_to_save.weight     the trained copy, again
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel

from pantheraml.base import log
from pantheraml.base.errors import ModelError

logger = log.get(__name__)


def restore_embeddings(
    base: PreTrainedModel, config: LoraConfig, weights: dict[str, Tensor], folder: Path
) -> dict[str, Tensor]:
    """Give `base` the matrices that were saved for it, in their size; return the weights that are the adapter's own."""
    names = {id(module): name for name, module in base.named_modules()}
    ends = [module for module in (base.get_input_embeddings(), base.get_output_embeddings()) if module is not None]
    ends_by_name = {names[id(end)]: end for end in ends}
    copied = [end for name, end in ends_by_name.items() if _is_named(name, config.modules_to_save or ())]
    left, found = dict(weights), dict[str, Tensor]()
    for name, end in ends_by_name.items():
        prefix = f"base_model.model.{name}"
        trained = any(end.weight is each.weight for each in copied)  # a tied head, with the embedding
        left.pop(f"{prefix}.modules_to_save.weight", None)
        own = left.pop(f"{prefix}.original_module.weight", None)
        if not trained:
            own = left.pop(f"{prefix}.weight", own)
        elif own is None and (copy := left.get(f"{prefix}.weight")) is not None and _grows(base, copy):
            own = copy  # its base's matrix, which the copy stands for
        if own is not None:
            found[name] = own
    if not found:
        return weights
    _require_fit(base, ends, found, names, folder)
    rows = next(iter(found.values())).shape[0]
    if rows != base.get_input_embeddings().weight.shape[0]:
        logger.info("the adapter was trained with a vocabulary of %d tokens: the embeddings are resized", rows)
        base.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for name, tensor in found.items():
            weight = base.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            weight.copy_(tensor)
    return left


def _is_named(name: str, chosen: Iterable[str]) -> bool:
    return any(name == each or name.endswith(f".{each}") for each in chosen)


def _grows(base: PreTrainedModel, copy: Tensor) -> bool:
    return bool(copy.shape[0] != base.get_input_embeddings().weight.shape[0])


def _require_fit(
    base: PreTrainedModel, ends: list[nn.Module], found: dict[str, Tensor], names: dict[int, str], folder: Path
) -> None:
    embedding = base.get_input_embeddings().weight
    missing = [names[id(end)] for end in ends if names[id(end)] not in found and end.weight is not embedding]
    shapes = {tuple(tensor.shape) for tensor in found.values()}
    if len(shapes) > 1 or next(iter(shapes))[1:] != embedding.shape[1:]:
        raise ModelError(
            f"The adapter in {folder} does not fit its base model: its embedding and output head are of other sizes.",
            fix="Use the base model that the adapter was trained on.",
        )
    (rows, _) = next(iter(shapes))
    if rows != embedding.shape[0] and missing:
        raise ModelError(
            f"The adapter in {folder} was trained with a vocabulary of {rows} tokens, and its base has"
            f" {embedding.shape[0]}, but the adapter lacks {', '.join(missing)} in that size.",
            fix="Save it again where it was trained, with model.save_pretrained(folder, save_embedding_layers=True), or"
            ' train it with modules_to_save=["embed_tokens", "lm_head"].',
        )
