"""The interface of a linear group: linear layers that read one input, frozen or trainable, as one matmul."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Operand(NamedTuple):
    """Rows for a group's matmul: [rows, width + pad_cols], in e4m3 with scales or unquantized."""

    qdata: Tensor
    scales: Tensor | None


class ForwardGroup(Protocol):
    """The part of a linear group that a pass without gradients needs."""

    pad_cols: int
    """Extra columns at the end of each row."""
    quantized: bool
    """Whether rows are in e4m3."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the results."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters, in the order of `parameter_gradients`."""
        ...

    def weights_read_in_backward(self) -> list[nn.Parameter]:
        """Those of `parameters()` that backward reads at their current values."""
        ...

    def operand(self, rows: Tensor) -> Operand:
        """Convert plain rows [rows, width] to this group's input."""
        ...

    def begin_forward(self, x: Operand) -> Tensor | None:
        """Return what `backward` needs besides `x`. Fills the padding columns of `x`."""
        ...

    def forward(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """Return the output [rows, height] and the result of `begin_forward`."""
        ...


class LinearGroup(ForwardGroup, Protocol):
    """Linear layers with one input, fused into one matmul."""

    layers: Sequence[nn.Module]
    multiplier: Tensor | None
    """Factor applied to a gradient of the output before it is quantized."""

    def swapped_parameters(self, others: list[nn.Parameter]) -> AbstractContextManager[None]:
        """Context in which autograd sees `others`, of the same values, instead of `parameters()`."""
        ...

    def gradient_operand(self, g: Tensor) -> Operand:
        """Convert a gradient of the output [rows, height] to the input of backward."""
        ...

    def begin_backward(self, g: Operand, lora_mid: Any) -> tuple[Tensor | None, Any]:
        """Return the input's gradient and what `parameter_gradients` needs besides rows. Fills the padding of `g`."""
        ...

    def parameter_gradients(self, g: Operand, x: Operand, lora_operands: Any) -> list[Tensor]:
        """Return the gradients of `parameters()`."""
        ...

    def backward(
        self, g: Operand, x: Operand, lora_mid: Any, *, needs_input_grad: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the input's gradient and those of `parameters()`."""
        ...
