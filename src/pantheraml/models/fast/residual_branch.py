"""How the output of attention or of the MLP enters the residual stream: as it is, normalized, or times a constant.

Gemma 3 normalizes it (a post-norm), Granite multiplies it. The post-norm's input is saved for backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.rms_norm import (
    QuantizedRows,
    rms_norm,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.models.fast.group_operand import LinearGroup, Operand


class Norm(NamedTuple):
    weight: Tensor
    epsilon: float
    plus_one: bool


class Branch(NamedTuple):
    norm: Norm | None = None
    """Norm of the output, before the residual add."""
    multiplier: float = 1.0

    @property
    def is_plain(self) -> bool:
        return self.norm is None and self.multiplier == 1.0

    @property
    def weight(self) -> Tensor | None:
        return None if self.norm is None else self.norm.weight

    def forward(self, delta: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what is added to the residual stream, and the inverse RMS of a norm's rows."""
        if self.norm is None:
            return (delta if self.multiplier == 1.0 else delta * self.multiplier), None
        weight, epsilon, plus_one = self.norm
        normed = rms_norm(delta, weight, epsilon, plus_one=plus_one, quantize=False)
        return normed.qdata, normed.inverse

    def saved(self, delta: Tensor) -> Tensor | None:
        """Return the rows that `backward` needs."""
        return None if self.norm is None else delta

    def backward(
        self, g: Tensor, saved: Tensor | None, inverse: Tensor | None, group: LinearGroup
    ) -> tuple[Tensor, Operand]:
        """Return the gradient of the output, also as the gradient operand of `group`, whose output it is."""
        if self.norm is not None:
            assert saved is not None
            assert inverse is not None
            return input_grad_and_operand(g, saved, self.norm, inverse, None, group)
        scaled = g if self.multiplier == 1.0 else g * self.multiplier
        return scaled, group.gradient_operand(scaled)

    def weight_gradient(self, g: Tensor, saved: Tensor | None, inverse: Tensor | None) -> Tensor:
        assert self.norm is not None
        assert saved is not None
        assert inverse is not None
        return rms_norm_weight_gradient(g, saved, inverse, self.norm.weight.dtype)


PLAIN = Branch()


def input_grad_and_operand(
    d_normed: Tensor,
    x: Tensor | QuantizedRows,
    norm: Norm,
    inverse: Tensor,
    residual: Tensor | None,
    group: LinearGroup,
) -> tuple[Tensor, Operand]:
    """Return the gradient of the norm's input, also as the gradient operand of `group`'s output."""
    dx, qdata, scales = rms_norm_backward_rows(
        d_normed, x, norm.weight, inverse,
        plus_one=norm.plus_one, residual=residual, pad_cols=group.pad_cols, multiplier=group.multiplier,
        dtype=E4M3 if group.quantized else group.dtype,
    )  # fmt: skip
    return dx, Operand(qdata, scales)
