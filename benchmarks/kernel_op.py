"""What an op of kernels.py is, the layer that it is measured on, and what the ops have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Inputs = dict[str, Any]
"""By name. Tensors that require a gradient are what the backward pass is measured on; without any there is none."""
Implementation = Callable[[Inputs], Any]
"""From inputs to the result; to one tensor, if it is differentiated."""


def as_it_is(result: Any) -> tuple[Any, ...]:
    return (result,)


@dataclass(frozen=True)
class Op:
    """`ours` and `reference` do the same work; `exact` is its definition without any rounding (None: the reference).

    `others` are makers: each imports what it needs and returns an implementation, or raises ImportError. `read` makes
    tensors that can be compared out of a result; its time does not count.
    """

    inputs: Inputs
    ours: Implementation
    reference: Implementation
    exact: Implementation | None = None
    read: Callable[[Any], tuple[Any, ...]] = as_it_is
    others: Mapping[str, Callable[[], Implementation]] = field(default_factory=dict)
    not_compiled: str | None = None
    """Why the reference is not compiled for comparison."""


class Layer:
    """Sizes of a layer, and random bf16 tensors on a device."""

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
    """(payload, scales, ...) in e4m3 with a scale per row as the numbers they stand for; a plain tensor as it is."""
    if not isinstance(rows, tuple):
        return (rows,)
    payload, scales = rows[:2]
    return (payload.float() * scales[:, None],)


def e4m3_matrix(layer: Layer, scales: Any, fill: Callable[[Any], None], *, transposed: bool) -> tuple[Any, Any]:
    """A new e4m3 matrix for gate or up, filled: for the way forward, or transposed, for the way back."""
    import torch

    shape = (layer.width, layer.inner) if transposed else (layer.inner, layer.width)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=layer.device)
    rows = out.T if transposed else out
    fill(rows)
    return rows, scales


def quantised(rows: Any) -> tuple[Any, Any]:
    from pantheraml.kernels.quantise_rows import reference_quantise_rows

    return reference_quantise_rows(rows)
