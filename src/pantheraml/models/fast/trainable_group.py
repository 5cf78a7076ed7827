"""Trainable linear layers that read the same input, fused into one matmul.

The layers keep their weights, which every pass reads in place. The matrix of the matmul, the weights stacked by rows,
is built just before it and freed afterwards. In fp8 that is one quantization of the weights, which the matmul needs
anyway; in bf16 it is a copy for groups of more than one layer, small compared with the activations: for 16,384 rows in
the shape of Llama-3.2-1B, gate and up are an eighth of their output.

In fp8 all three matmuls are fp8. The gradient of a weight is a sum over rows, so the row scales are folded into the
values of one operand (see `kernels.fp8.transpose`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.matmul import fp8_matmul
from pantheraml.kernels.fp8.quantize_rows import quantize_rows
from pantheraml.kernels.fp8.transpose import fp8_transpose
from pantheraml.kernels.fp8.weight_cast import weight_scales, weight_to_e4m3
from pantheraml.kernels.lora_columns import DIVISOR
from pantheraml.models.fast.group_operand import Operand
from pantheraml.models.quantize.fp8_training import FP8TrainingLinear


def is_trainable(layer: Any) -> bool:
    """Return whether this is a plain layer with a trainable weight."""
    return isinstance(layer, nn.Linear) and layer.weight.requires_grad


def why_not_fused_trainable(layer: Any) -> str | None:
    """Return why this trainable layer cannot be fused, or None if it can."""
    if type(layer) not in (nn.Linear, FP8TrainingLinear):
        return f"it is a {type(layer).__name__}"
    if layer.bias is not None:
        return "it has a bias, which fused layers do not train"
    if layer.in_features % DIVISOR or layer.out_features % DIVISOR:
        return f"its width or height is not a multiple of {DIVISOR}"
    return None


def weight_of(module: Any) -> nn.Parameter:
    """Return the current weight, from the module's dict: attribute access is slow, and hundreds of weights are read
    before a model's first kernel launch.
    """
    own: nn.Parameter | None = module._parameters.get("weight")
    weight: nn.Parameter = module.weight if own is None else own
    return weight


@contextlib.contextmanager
def swapped_weights(modules: Sequence[nn.Module], others: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which the modules have `others` as their weights."""
    own = [module._parameters["weight"] for module in modules]
    try:
        for module, other in zip(modules, others, strict=True):
            module._parameters["weight"] = other
        yield
    finally:
        for module, weight in zip(modules, own, strict=True):
            module._parameters["weight"] = weight


class TrainableGroup:
    """Trainable layers with one input, fused into one matmul. No padding columns: there are no adapters."""

    pad_cols = 0
    multiplier: Tensor | None = None

    def __init__(self, layers: Sequence[Any]) -> None:
        """All layers are of one class, and `why_not_fused_trainable` is None for each."""
        self.layers = layers
        self.quantized = isinstance(layers[0], FP8TrainingLinear)
        self.width: int = layers[0].in_features
        self.height: int = sum(layer.out_features for layer in layers)
        self._heights = [layer.out_features for layer in layers]

    @property
    def dtype(self) -> torch.dtype:
        return weight_of(self.layers[0]).dtype

    def parameters(self) -> list[nn.Parameter]:
        return list(map(weight_of, self.layers))

    def weights_read_in_backward(self) -> list[nn.Parameter]:
        return self.parameters()

    def swapped_parameters(self, others: list[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        return swapped_weights(self.layers, others)

    def operand(self, rows: Tensor) -> Operand:
        if self.quantized:
            return Operand(*quantize_rows(rows))
        return Operand(rows.to(self.dtype), None)

    gradient_operand = operand

    def begin_forward(self, x: Operand) -> Tensor | None:
        """Return the weights' scale, repeated for the larger of the matmuls; None in bf16."""
        return weight_scales(self.parameters(), max(self.height, self.width)) if self.quantized else None

    def forward(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        scales = self.begin_forward(x)
        if scales is None:
            return x.qdata @ self._matrix().T, None
        assert x.scales is not None
        matrix = torch.empty(self.height, self.width, dtype=E4M3, device=scales.device)
        self._write(scales, matrix)
        return fp8_matmul(x.qdata, x.scales, matrix, scales[: self.height], self.dtype), scales

    def backward(
        self, g: Operand, x: Operand, lora_mid: Tensor | None, *, needs_input_grad: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        d_input = self.begin_backward(g, lora_mid)[0] if needs_input_grad else None
        return d_input, self.parameter_gradients(g, x, None)

    def begin_backward(self, g: Operand, lora_mid: Tensor | None) -> tuple[Tensor, None]:
        if lora_mid is None:
            return g.qdata @ self._matrix(), None
        assert g.scales is not None
        matrix = torch.empty(self.width, self.height, dtype=E4M3, device=lora_mid.device)
        self._write(lora_mid, matrix.T)
        return fp8_matmul(g.qdata, g.scales, matrix, lora_mid[: self.width], self.dtype), None

    def parameter_gradients(self, g: Operand, x: Operand, lora_operands: None) -> list[Tensor]:
        """Compute one stacked matrix, of which each weight's gradient is a slice of rows."""
        if g.scales is None or x.scales is None:
            stacked = g.qdata.T @ x.qdata
        else:
            lhs, scales = fp8_transpose(g.qdata, g.scales * x.scales)
            rhs, _ = fp8_transpose(x.qdata, None)
            assert scales is not None
            stacked = fp8_matmul(lhs, scales, rhs, None, self.dtype, long_sum=True)
        return list(stacked.split(self._heights))

    def _matrix(self) -> Tensor:
        weights: list[Tensor] = [*map(weight_of, self.layers)]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _write(self, scales: Tensor, matrix: Tensor) -> None:
        """Cast the stacked weights into an e4m3 matrix [height, width], which may be a transposed view."""
        start = 0
        for weight, height in zip(self.parameters(), self._heights, strict=True):
            weight_to_e4m3(weight, scales, matrix[start : start + height])
            start += height
