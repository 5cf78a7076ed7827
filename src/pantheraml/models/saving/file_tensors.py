"""Turn the tensors of a model into those of its checkpoint files, where transformers names or groups them otherwise.

transformers holds the experts of a mixture as one tensor and some layers under other names than its checkpoints do. Its
own rules are reverted, on one tensor at a time where no rule joins several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pantheraml.base import log
from pantheraml.models.saving.merged_tensors import LazyTensor

logger = log.get(__name__)


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of the files that are computed together."""

    metas: Mapping[str, Tensor]
    """Name in the files -> tensor on the meta device, for its shape and dtype."""
    read: Callable[[], dict[str, Tensor]]


def file_groups(model: Any, tensors: Mapping[str, LazyTensor]) -> list[TensorGroup]:
    metas = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
    expected = _described(revert_weight_conversion(model, dict(metas)))
    if expected == _described(metas):
        return [TensorGroup({name: metas[name]}, _reader(None, {name: t})) for name, t in tensors.items()]
    groups = [TensorGroup(made, read) for made, read in _one_by_one(model, tensors, metas)]
    together = [item for group in groups for item in _described(group.metas).items()]
    if len(together) == len(expected) and dict(together) == expected:
        return groups
    logger.info(
        "the checkpoint format of %s joins weights: it is converted as a whole, in memory", type(model).__name__
    )
    return [TensorGroup(revert_weight_conversion(model, dict(metas)), _reader(model, tensors))]


def _one_by_one(
    model: Any, tensors: Mapping[str, LazyTensor], metas: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Tensor], Callable[[], dict[str, Tensor]]]]:
    for name, tensor in tensors.items():
        try:
            made = revert_weight_conversion(model, {name: metas[name]})
        # a rule that needs several tensors may raise anything; the names that are missing then decide
        except Exception:
            logger.debug("%s cannot be converted alone", name, exc_info=True)
            continue
        yield made, _reader(model, {name: tensor})


def _reader(model: Any, tensors: Mapping[str, LazyTensor]) -> Callable[[], dict[str, Tensor]]:
    def read() -> dict[str, Tensor]:
        own = {name: tensor.read() for name, tensor in tensors.items()}
        made = own if model is None else revert_weight_conversion(model, own)
        return {name: tensor.contiguous() for name, tensor in made.items()}

    return read


def _described(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
