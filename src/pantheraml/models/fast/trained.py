"""Trained linear layers that read the same input, as one matrix product.

The layers keep their weights, which are read where they are in every pass. The matrix of a product, the weights below
each other, is built just before it and dropped after it. In fp8 that is one rounding of the weights, which a product
needs anyway; in bf16 it is a copy, for groups of more than one layer, and small beside the rows: for 16,384 rows in the
shape of Llama-3.2-1B gate and up are an eighth of what they give.

In fp8 all three products are. The gradient of a weight is a sum over rows, so the rows' scales are taken into the
values of one side (see `kernels.turned_rows`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.fp8_product import fp8_product
from pantheraml.kernels.lora_columns import DIVISOR
from pantheraml.kernels.quantise_rows import quantise_rows
from pantheraml.kernels.trained_weight import weight_scales, weight_to_e4m3
from pantheraml.kernels.turned_rows import turned_rows
from pantheraml.models.fast.operand import Operand
from pantheraml.models.quantise.trained_fp8 import TrainedFP8Linear


def is_trained(layer: Any) -> bool:
    """A plain layer whose weight is trained."""
    return isinstance(layer, nn.Linear) and layer.weight.requires_grad


def why_not_trained(layer: Any) -> str | None:
    """Why this trained layer cannot be part of a fused product, or None if it can."""
    if type(layer) not in (nn.Linear, TrainedFP8Linear):
        return f"it is a {type(layer).__name__}"
    if layer.bias is not None:
        return "it has a bias, which fused layers do not train"
    if layer.in_features % DIVISOR or layer.out_features % DIVISOR:
        return f"its width or height is not a multiple of {DIVISOR}"
    return None


def weight_of(module: Any) -> nn.Parameter:
    """As it is now. By the dictionary behind it: a model is asked for hundreds before its first kernel starts."""
    own: nn.Parameter | None = module._parameters.get("weight")
    weight: nn.Parameter = module.weight if own is None else own
    return weight


@contextlib.contextmanager
def with_weights(modules: Sequence[nn.Module], others: Sequence[nn.Parameter]) -> Iterator[None]:
    """The modules have `others` as their weights meanwhile."""
    own = [module._parameters["weight"] for module in modules]
    try:
        for module, other in zip(modules, others, strict=True):
            module._parameters["weight"] = other
        yield
    finally:
        for module, weight in zip(modules, own, strict=True):
            module._parameters["weight"] = weight


class TrainedGroup:
    """Trained layers with one input, as one product. Rows have no room: there are no adapters."""

    room = 0
    multiplier: Tensor | None = None

    def __init__(self, layers: Sequence[Any]) -> None:
        """None of the layers may have a reason in `why_not_trained`, and all are of one class."""
        self.layers = layers
        self.quantised = isinstance(layers[0], TrainedFP8Linear)
        self.width: int = layers[0].in_features
        self.height: int = sum(layer.out_features for layer in layers)
        self._heights = [layer.out_features for layer in layers]

    @property
    def dtype(self) -> torch.dtype:
        return weight_of(self.layers[0]).dtype

    def parameters(self) -> list[nn.Parameter]:
        return list(map(weight_of, self.layers))

    def read_back(self) -> list[nn.Parameter]:
        return self.parameters()

    def with_parameters(self, others: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        return with_weights(self.layers, others)

    def operand(self, rows: Tensor) -> Operand:
        if self.quantised:
            return Operand(*quantise_rows(rows))
        return Operand(rows.to(self.dtype), None)

    gradient_operand = operand

    def begin_forward(self, x: Operand) -> Tensor | None:
        """The scale of the weights, as often as one of the products wants it; None in bf16."""
        return weight_scales(self.parameters(), max(self.height, self.width)) if self.quantised else None

    def forward(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        scales = self.begin_forward(x)
        if scales is None:
            return x.payload @ self._matrix().T, None
        assert x.scales is not None
        matrix = torch.empty(self.height, self.width, dtype=E4M3, device=scales.device)
        self._write(scales, matrix)
        return fp8_product(x.payload, x.scales, matrix, scales[: self.height], self.dtype), scales

    def backward(
        self, g: Operand, x: Operand, middle: Tensor | None, *, wants_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        d_input = self.begin_backward(g, middle)[0] if wants_input else None
        return d_input, self.parameter_gradients(g, x, None)

    def begin_backward(self, g: Operand, middle: Tensor | None) -> tuple[Tensor, None]:
        if middle is None:
            return g.payload @ self._matrix(), None
        assert g.scales is not None
        matrix = torch.empty(self.width, self.height, dtype=E4M3, device=middle.device)
        self._write(middle, matrix.T)
        return fp8_product(g.payload, g.scales, matrix, middle[: self.width], self.dtype), None

    def parameter_gradients(self, g: Operand, x: Operand, sides: None) -> list[Tensor]:
        """One matrix, of which each weight's gradient is some rows."""
        if g.scales is None or x.scales is None:
            whole = g.payload.T @ x.payload
        else:
            left, scales = turned_rows(g.payload, g.scales * x.scales)
            right, _ = turned_rows(x.payload, None)
            assert scales is not None
            whole = fp8_product(left, scales, right, None, self.dtype, long_sum=True)
        return list(whole.split(self._heights))

    def _matrix(self) -> Tensor:
        weights: list[Tensor] = [*map(weight_of, self.layers)]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _write(self, scales: Tensor, matrix: Tensor) -> None:
        """The weights below each other into an e4m3 matrix [height, width], which may be a transposed one."""
        start = 0
        for weight, height in zip(self.parameters(), self._heights, strict=True):
            weight_to_e4m3(weight, scales, matrix[start : start + height])
            start += height
