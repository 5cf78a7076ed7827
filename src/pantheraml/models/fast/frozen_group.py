"""The frozen weights of a linear group alone, for passes with disabled adapters.

DPO, KTO and GRPO take the model without its adapters as the reference. The group's matrix must keep the adapters'
values meanwhile: the backward of the policy's pass, which came first, reads them. So this pass reads the weights' part
of that matrix, and computes no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pantheraml.kernels.fp8.matmul import fp8_matmul
from pantheraml.kernels.fp8.quantize_rows import quantize_rows
from pantheraml.models.fast.group_operand import Operand
from pantheraml.models.fast.linear_groups import LoraGroup


class FrozenGroup:
    pad_cols = 0

    def __init__(self, group: LoraGroup) -> None:
        self._group = group
        self.quantized = group.quantized

    @property
    def dtype(self) -> torch.dtype:
        return self._group.dtype

    def parameters(self) -> list[nn.Parameter]:
        return []

    weights_read_in_backward = parameters

    def operand(self, rows: Tensor) -> Operand:
        if self.quantized:
            return Operand(*quantize_rows(rows))
        return Operand(rows.to(self.dtype), None)

    def begin_forward(self, x: Operand) -> None:
        """Return None: there is no backward."""

    def forward(self, x: Operand) -> tuple[Tensor, None]:
        group, weights = self._group, self._group.frozen_weights()
        if x.scales is None:
            out = x.qdata @ weights.T
        else:
            out = fp8_matmul(x.qdata, x.scales, weights, group.scales, self.dtype)
        return (out if group.bias is None else out + group.bias), None
