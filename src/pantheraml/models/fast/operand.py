"""What the pieces of a fused layer need of a group of linear layers with one input, frozen or trained."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Operand(NamedTuple):
    """Rows for a group's product: [rows, width + room], in e4m3 with scales or plainly."""

    payload: Tensor
    scales: Tensor | None


class Group(Protocol):
    """Layers with one input, as one product."""

    layers: Sequence[nn.Module]
    room: int
    """Columns that rows have behind their own."""
    quantised: bool
    """Rows are in e4m3."""
    multiplier: Tensor | None
    """What a gradient of the output is multiplied by before it is quantised."""

    @property
    def dtype(self) -> torch.dtype:
        """Of results."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """What is trained, in the order of `parameter_gradients`."""
        ...

    def read_back(self) -> list[nn.Parameter]:
        """Those of `parameters()` that the way back reads as they are then."""
        ...

    def with_parameters(self, others: list[nn.Parameter]) -> AbstractContextManager[None]:
        """Autograd sees `others`, of the same values, in the place of `parameters()`."""
        ...

    def operand(self, rows: Tensor) -> Operand:
        """Plain rows [rows, width] as this group's input."""
        ...

    def gradient_operand(self, g: Tensor) -> Operand:
        """A gradient of the output [rows, height] as input of the way back."""
        ...

    def begin_forward(self, x: Operand) -> Tensor | None:
        """What `backward` needs besides `x`, which is completed."""
        ...

    def forward(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        """The output [rows, height], and what `begin_forward` gives."""
        ...

    def begin_backward(self, g: Operand, middle: Any) -> tuple[Tensor | None, Any]:
        """The input's gradient, and what `parameter_gradients` needs besides rows. Completes `g`."""
        ...

    def parameter_gradients(self, g: Operand, x: Operand, sides: Any) -> list[Tensor]:
        """Gradients of `parameters()`."""
        ...

    def backward(
        self, g: Operand, x: Operand, middle: Any, *, wants_input: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The input's gradient, and those of `parameters()`."""
        ...
