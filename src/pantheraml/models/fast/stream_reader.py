"""How a branch reads the residual stream: normalized, as in most families, or as it is.

OLMo 2 and 3 and EXAONE 4 normalize the output of a branch and not its input (`residual_branch`).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pantheraml.kernels.rms_norm import QuantizedRows, rms_norm, rms_norm_backward, rms_norm_weight_gradient
from pantheraml.models.fast.group_operand import ForwardGroup, LinearGroup, Operand
from pantheraml.models.fast.residual_branch import Norm, input_grad_and_operand


class Read(NamedTuple):
    """What a branch reads."""

    operand: Operand
    """The input of the branch's first matmul."""
    inverse: Tensor | None
    """Inverse RMS of each row, if there is a norm."""
    total: Tensor
    """The residual stream: x, or x + delta."""

    def plain_norm_input(self, norm: Norm | None, trainable: bool) -> Tensor | None:
        """Return the norm's plain input if the gradient of its input or weight needs it."""
        return self.total if norm is not None and (trainable or self.operand.scales is None) else None


def read_stream(x: Tensor, norm: Norm | None, group: ForwardGroup, delta: Tensor | None = None) -> Read:
    """Add `delta`, if any, to the residual stream x, and make the operand of `group`."""
    if norm is None:
        total = x if delta is None else x + delta
        return Read(group.operand(total), None, total)
    normed = rms_norm(
        x, norm.weight, norm.epsilon,
        delta=delta, pad_cols=group.pad_cols, plus_one=norm.plus_one, quantize=group.quantized,
    )  # fmt: skip
    return Read(Operand(normed.qdata, normed.scales), normed.inverse, normed.total)


class StreamGradient(NamedTuple):
    """Gradients behind the rows that a branch read."""

    d_rows: Tensor
    """Gradient of the rows."""
    norm: Norm | None
    rows: Tensor | QuantizedRows | None
    """What the norm's gradient is computed from: its input, or the quantized rows."""
    inverse: Tensor | None
    residual: Tensor
    """Gradient of the residual stream beside the branch."""

    def of_stream(self) -> Tensor:
        """Return the gradient of the residual stream."""
        if self.norm is None:
            return self.d_rows + self.residual
        rows, inverse = self._normalized()
        return rms_norm_backward(
            self.d_rows, rows, self.norm.weight, inverse, plus_one=self.norm.plus_one, residual=self.residual
        )

    def of_stream_and_operand(self, group: LinearGroup) -> tuple[Tensor, Operand]:
        """Return it also as the gradient operand of `group`, whose output was added to the stream."""
        if self.norm is None:
            total = self.of_stream()
            return total, group.gradient_operand(total)
        rows, inverse = self._normalized()
        return input_grad_and_operand(self.d_rows, rows, self.norm, inverse, self.residual, group)

    def of_weight(self, plain: Tensor | None) -> Tensor:
        """Return the gradient of the norm's weight; `plain` is the norm's input."""
        assert self.norm is not None
        assert self.inverse is not None
        assert plain is not None
        return rms_norm_weight_gradient(self.d_rows, plain, self.inverse, self.norm.weight.dtype)

    def _normalized(self) -> tuple[Tensor | QuantizedRows, Tensor]:
        assert self.rows is not None
        assert self.inverse is not None
        return self.rows, self.inverse


def norm_rows(norm: Norm | None, plain: Tensor | None, operand: Operand) -> Tensor | QuantizedRows | None:
    """Return the rows that the norm's gradient is computed from."""
    if norm is None or plain is not None:
        return plain
    assert operand.scales is not None
    return QuantizedRows(operand.qdata, operand.scales)
