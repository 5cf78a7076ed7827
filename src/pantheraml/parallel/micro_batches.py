"""Pipelining of a model whose layers are on several GPUs of one process: several parts of each batch in flight.

Kernels are queued asynchronously, so while one GPU works on the first part, the GPU before it takes the next. The
whole batch in one piece would keep all GPUs but one waiting.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pantheraml.base.errors import ConfigError, UnsupportedModelError


class MicroBatches(nn.Module):
    """Calls `module` with `count` parts of each batch and joins the outputs: rows concatenated, scalars averaged."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module, self.count = module, count

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values, structure = tree_flatten((args, kwargs))
        rows = {value.shape[0] for value in values if isinstance(value, Tensor) and value.dim() > 0}
        if len(rows) != 1:
            raise ConfigError(
                f"A batch cannot be divided into micro-batches: its tensors have {sorted(rows) or 'no'} rows.",
                fix="Pass tensors with one row per sample, or use hybrid_strategy='model_parallel'.",
            )
        (size,) = rows
        bounds = _bounds(size, min(self.count, size))
        if len(bounds) < 2:
            return self.module(*args, **kwargs)
        outputs = []
        for begin, end in bounds:
            part = [_rows(value, begin, end) for value in values]
            part_args, part_kwargs = tree_unflatten(part, structure)
            outputs.append(self.module(*part_args, **part_kwargs))
        return _joined(outputs, [end - begin for begin, end in bounds])


def _bounds(size: int, parts: int) -> list[tuple[int, int]]:
    ends = [size * (part + 1) // parts for part in range(parts)]
    return list(zip([0, *ends], ends, strict=False))


def _rows(value: Any, begin: int, end: int) -> Any:
    return value[begin:end] if isinstance(value, Tensor) and value.dim() > 0 else value


def _joined(outputs: list[Any], sizes: list[int]) -> Any:
    flat = [tree_flatten(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat):
        raise UnsupportedModelError(
            "The model returns outputs of different structure for parts of one batch.",
            fix="Use hybrid_strategy='model_parallel'.",
        )
    return tree_unflatten([_join(list(parts), sizes) for parts in zip(*(v for v, _ in flat), strict=True)], structure)


def _join(parts: list[Any], sizes: list[int]) -> Any:
    if not isinstance(parts[0], Tensor):
        if any(part is not parts[0] and part != parts[0] for part in parts):
            raise UnsupportedModelError(
                f"The model returns a {type(parts[0]).__name__} that differs between parts of one batch.",
                fix="Use hybrid_strategy='model_parallel'.",
            )
        return parts[0]
    if parts[0].dim() == 0:
        return torch.stack([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]).sum()
    return torch.cat(parts)
