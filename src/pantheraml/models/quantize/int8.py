"""Frozen linear layers in int8, with one scale per output row.

A row's largest magnitude maps to 127 and values round to the nearest step, so the error is at most half a step. The
weight lives in buffers and has no gradient. Forward and backward dequantize it to the compute dtype and drop it again;
autograd saves only the int8 form. Plain torch, any device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pantheraml.models.quantize.nf4 import plain_linear
from pantheraml.models.quantize.quantized_lora import QuantizedLoraLinear

INT8_MAX = 127
CHUNK_VALUES = 1 << 24
"""Values rounded at once, so that no float32 copy of a whole weight exists."""


class Int8Weight(NamedTuple):
    """Quantized weight (out_features, in_features): `qdata * scale`."""

    qdata: Tensor
    scale: Tensor
    """[out_features, 1] float32."""

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Weight:
        weight = weight.detach()
        # Divide by a tensor: for a Python scalar CUDA multiplies by its rounded inverse, which differs from the CPU.
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scale = torch.where(largest > 0, largest, torch.ones_like(largest)) / torch.full_like(largest, INT8_MAX)
        qdata = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        rows = max(1, CHUNK_VALUES // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = slice(start, start + rows)
            qdata[part] = (weight[part].float() / scale[part]).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
        return cls(qdata, scale)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        # In place, so that the float32 scale is not rounded to bf16 before the multiplication.
        return self.qdata.to(dtype).mul_(self.scale)


class Int8Linear(nn.Module):
    """A frozen `nn.Linear` (or GPT-2's transposed `Conv1D`) with its weight in int8."""

    qweight: Tensor
    """[out_features, in_features] int8. PEFT finds a layer's device by this name."""
    scale: Tensor
    bias: Tensor | None
    dense_dtype = torch.bfloat16
    """Dtype when dequantized to a plain layer."""

    def __init__(self, weight: Tensor | Int8Weight, bias: Tensor | None, *, from_conv1d: bool = False) -> None:
        """`weight` is (out_features, in_features), dense or already quantized."""
        super().__init__()
        quantized = weight if isinstance(weight, Int8Weight) else Int8Weight.quantize(weight)
        self.out_features, self.in_features = quantized.qdata.shape
        self.from_conv1d = from_conv1d
        self.register_buffer("qweight", quantized.qdata)
        self.register_buffer("scale", quantized.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def quantized_weight(self) -> Int8Weight:
        return Int8Weight(self.qweight, self.scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as the forward uses it, (out_features, in_features)."""
        return self.quantized_weight().dequantize(dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """Dequantize to a plain layer of the original kind."""
        return plain_linear(self.dequantize(dtype), self.bias, from_conv1d=self.from_conv1d)

    def keep_rows(self, rows: slice) -> None:
        """Keep only these output rows."""
        self.qweight, self.scale = self.qweight[rows].clone(), self.scale[rows].clone()
        self.bias = None if self.bias is None else self.bias[rows].clone()
        self.out_features = self.qweight.shape[0]

    def keep_columns(self, columns: slice) -> None:
        """Keep only these input columns. The bias is unchanged."""
        self.qweight = self.qweight[:, columns].clone(memory_format=torch.contiguous_format)
        self.in_features = self.qweight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        out: Tensor = _Int8Matmul.apply(x.to(dtype), *self.quantized_weight())
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8LoraLinear(QuantizedLoraLinear):
    """PEFT's LoRA layer over an Int8Linear."""


class _Int8Matmul(torch.autograd.Function):
    """x @ W.T, dequantizing W in forward and backward. Autograd saves only the quantized W (not even x: there is no
    dW)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(qdata, scale)
        return F.linear(x, Int8Weight(qdata, scale).dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad @ Int8Weight(*ctx.saved_tensors).dequantize(grad.dtype), None, None
