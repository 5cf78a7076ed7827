"""INT8: linear layers whose frozen weight takes eight bits a value, with one scale per row (output).

The largest magnitude of a row becomes 127, and every value the nearest multiple of that row's step; a value is off by
half a step at most. The weight lives in buffers and has no gradient. Forward and backward rebuild it in the dtype of
the arithmetic and drop it again; autograd keeps the packed form alone. Plain torch, for any device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pantheraml.models.quantise.lora import PackedLoraLinear
from pantheraml.models.quantise.nf4 import plain_linear

LARGEST = 127
PIECE = 1 << 24
"""Values rounded at once, so that no float32 copy of a whole weight exists."""


class Int8Weight(NamedTuple):
    """A packed weight (out_features, in_features): `payload * scale`."""

    payload: Tensor
    scale: Tensor
    """[out_features, 1] float32."""

    @classmethod
    def pack(cls, weight: Tensor) -> Int8Weight:
        weight = weight.detach()
        # by a tensor: CUDA divides by a number with its rounded inverse, and would pack otherwise than the CPU
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scale = torch.where(largest > 0, largest, torch.ones_like(largest)) / torch.full_like(largest, LARGEST)
        payload = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        rows = max(1, PIECE // weight.shape[1])
        for start in range(0, weight.shape[0], rows):
            part = slice(start, start + rows)
            payload[part] = (weight[part].float() / scale[part]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return cls(payload, scale)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        # in place, where a float32 scale is not rounded to bf16 before the product but only its result is
        return self.payload.to(dtype).mul_(self.scale)


class Int8Linear(nn.Module):
    """A frozen `nn.Linear` (or GPT-2's `Conv1D`, which is one with its weight transposed) with its weight in int8."""

    qweight: Tensor
    """[out_features, in_features] int8. PEFT finds a layer's device by this name."""
    scale: Tensor
    bias: Tensor | None
    dense_dtype = torch.bfloat16
    """Of a plain layer that takes its place."""

    def __init__(self, weight: Tensor | Int8Weight, bias: Tensor | None, *, from_conv1d: bool = False) -> None:
        """`weight` is (out_features, in_features), dense or packed already."""
        super().__init__()
        packed = weight if isinstance(weight, Int8Weight) else Int8Weight.pack(weight)
        self.out_features, self.in_features = packed.payload.shape
        self.from_conv1d = from_conv1d
        self.register_buffer("qweight", packed.payload)
        self.register_buffer("scale", packed.scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def packed(self) -> Int8Weight:
        return Int8Weight(self.qweight, self.scale)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as the forward pass sees it, (out_features, in_features)."""
        return self.packed().dequantise(dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """A plain layer of the kind this one was made from, with the weight that int8 left of the original."""
        return plain_linear(self.dequantise(dtype), self.bias, from_conv1d=self.from_conv1d)

    def keep_rows(self, rows: slice) -> None:
        """Become the layer of these outputs alone."""
        self.qweight, self.scale = self.qweight[rows].clone(), self.scale[rows].clone()
        self.bias = None if self.bias is None else self.bias[rows].clone()
        self.out_features = self.qweight.shape[0]

    def keep_columns(self, columns: slice) -> None:
        """Become the layer of these inputs alone. The bias stays."""
        self.qweight = self.qweight[:, columns].clone(memory_format=torch.contiguous_format)
        self.in_features = self.qweight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        out: Tensor = _PackedMatmul.apply(x.to(dtype), *self.packed())
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8LoraLinear(PackedLoraLinear):
    """PEFT's LoRA layer over an Int8Linear."""


class _PackedMatmul(torch.autograd.Function):
    """x @ W.T with W rebuilt on either way; what autograd keeps is the packed W alone (not even x: there is no dW)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, payload: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(payload, scale)
        return F.linear(x, Int8Weight(payload, scale).dequantise(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return grad @ Int8Weight(*ctx.saved_tensors).dequantise(grad.dtype), None, None
