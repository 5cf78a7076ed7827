"""Definition of a benchmarked op, the layer shape it is measured on, and helpers shared by the ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, Any]
"""Inputs by name. The backward pass is measured only if some tensors require a gradient."""
Implementation = Callable[[Inputs], Any]
"""Function from inputs to the output, which is a single tensor if it is differentiated."""


def as_it_is(result: Any) -> tuple[Any, ...]:
    return (result,)


@dataclass(frozen=True)
class Op:
    """`ours` and `reference` do the same work; `exact` computes it without rounding (None: the reference).

    `others` are factories: each imports its library and returns an implementation, or raises ImportError. `read`
    converts an output to comparable tensors and is not timed.
    """

    inputs: Inputs
    ours: Implementation
    reference: Implementation
    exact: Implementation | None = None
    read: Callable[[Any], tuple[Any, ...]] = as_it_is
    others: Mapping[str, Callable[[], Implementation]] = field(default_factory=dict)
    not_compiled: str | None = None
    """Why there is no compiled reference, if there is none."""


class Layer:
    """Layer shape, and random bf16 tensors on a device."""

    def __init__(self, size: str, device: str) -> None:
        import torch

        full = size == "full"
        self.tokens, self.width, self.inner = (8192, 4096, 14336) if full else (32, 128, 256)
        self.vocabulary, self.rank = (128_256 if full else 128), 16
        self.heads, self.key_heads, self.head_dim = (32, 8, 128) if full else (4, 2, 32)
        self.device = device
        self._random = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int) -> Any:
        import torch

        return torch.randn(shape, generator=self._random, device=self.device, dtype=torch.bfloat16)

    def targets(self) -> Any:
        import torch

        return torch.randint(self.vocabulary, (self.tokens,), generator=self._random, device=self.device)


def either(rows: Any) -> tuple[Any, ...]:
    """Dequantize (qdata, scales, ...) with row scales; return a plain tensor unchanged."""
    if not isinstance(rows, tuple):
        return (rows,)
    qdata, scales = rows[:2]
    return (qdata.float() * scales[:, None],)


def e4m3_matrix(layer: Layer, scales: Any, fill: Callable[[Any], None], *, transposed: bool) -> tuple[Any, Any]:
    """A new e4m3 matrix for gate or up, filled for the forward pass, or transposed for the backward pass."""
    import torch

    shape = (layer.width, layer.inner) if transposed else (layer.inner, layer.width)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=layer.device)
    rows = out.T if transposed else out
    fill(rows)
    return rows, scales


def quantized(rows: Any) -> tuple[Any, Any]:
    from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows

    return reference_quantize_rows(rows)
