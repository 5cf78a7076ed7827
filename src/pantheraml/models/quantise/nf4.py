"""NF4: linear layers whose frozen weight takes about 4.13 bits a value (the format: `kernels.nf4`).

The weight lives in buffers and has no gradient. Forward and backward rebuild it when they need it and drop it again:
autograd keeps the packed form. This is the plain way, for any device; `models.fast` has a faster one for GPUs with fp8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.nf4 import BLOCK, SCALE_BLOCK, BlockScales, NF4Weight
from pantheraml.models.quantise.lora import PackedLoraLinear


class NF4Linear(nn.Module):
    """A frozen `nn.Linear` (or GPT-2's `Conv1D`, which is one with its weight transposed) with its weight in NF4."""

    qweight: Tensor
    """Two 4-bit codes a byte. PEFT finds a layer's device by this name."""
    scale_code: Tensor
    scale_table: Tensor | None
    scale_step: Tensor | None
    scale_low: Tensor | None
    bias: Tensor | None
    dense_dtype = torch.bfloat16
    """Of a plain layer that takes its place."""

    def __init__(self, weight: Tensor | NF4Weight, bias: Tensor | None, *, from_conv1d: bool = False) -> None:
        """`weight` is (out_features, in_features), dense or packed already."""
        super().__init__()
        packed = weight if isinstance(weight, NF4Weight) else NF4Weight.pack(weight)
        self.out_features, self.in_features = packed.shape
        self.from_conv1d = from_conv1d
        self.register_buffer("qweight", packed.payload)
        for name, buffer in packed.scales._asdict().items():
            self.register_buffer(f"scale_{name}", buffer)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def packed(self) -> NF4Weight:
        scales = BlockScales(self.scale_code, self.scale_table, self.scale_step, self.scale_low)
        return NF4Weight(self.qweight, scales, torch.Size((self.out_features, self.in_features)))

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as the forward pass sees it, (out_features, in_features)."""
        return self.packed().dequantise(dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """A plain layer of the kind this one was made from, with the weight that NF4 left of the original."""
        return plain_linear(self.dequantise(dtype), self.bias, from_conv1d=self.from_conv1d)

    def keep_rows(self, rows: slice) -> None:
        """Become the layer of these outputs alone."""
        first, last = rows.start * self.in_features, rows.stop * self.in_features
        if first % BLOCK or (last % BLOCK and rows.stop < self.out_features):
            raise _through_a_block(f"{rows.stop - rows.start} outputs of {self.in_features} inputs")
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        payload = self.qweight[blocks.start * BLOCK // 2 : blocks.stop * BLOCK // 2].clone()
        self._keep(payload, _scales_of(self.packed().scales, blocks))
        self.bias = None if self.bias is None else self.bias[rows].clone()
        self.out_features = rows.stop - rows.start

    def keep_columns(self, columns: slice) -> None:
        """Become the layer of these inputs alone. The bias stays."""
        if self.in_features % BLOCK or columns.start % BLOCK or columns.stop % BLOCK:
            raise _through_a_block(f"{columns.stop - columns.start} of {self.in_features} inputs")
        codes = self.qweight.view(self.out_features, -1)[:, columns.start // 2 : columns.stop // 2]
        # each row loses some blocks, so those that share a step are no longer neighbours
        magnitudes = self.packed().scales.values().view(self.out_features, -1)
        magnitudes = magnitudes[:, columns.start // BLOCK : columns.stop // BLOCK]
        self._keep(codes.flatten().clone(), BlockScales(magnitudes.flatten().clone()))
        self.in_features = columns.stop - columns.start

    def _keep(self, payload: Tensor, scales: BlockScales) -> None:
        self.qweight = payload
        for name, buffer in scales._asdict().items():
            setattr(self, f"scale_{name}", buffer)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        weight = self.packed()
        out: Tensor = _PackedMatmul.apply(x.to(dtype), weight.shape, weight.payload, *weight.scales)
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _scales_of(scales: BlockScales, blocks: slice) -> BlockScales:
    """The same magnitudes, packed where the first block begins a step of its own, else as numbers (0.37 more bits a
    value)."""
    if scales.step is None or scales.low is None or blocks.start % SCALE_BLOCK:
        return BlockScales(scales.values()[blocks].clone())
    steps = slice(blocks.start // SCALE_BLOCK, -(-blocks.stop // SCALE_BLOCK))
    return BlockScales(scales.code[blocks].clone(), scales.table, scales.step[steps].clone(), scales.low[steps].clone())


def _through_a_block(part: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"An nf4 layer cannot be cut to {part}: that goes through a block of {BLOCK} values with one magnitude.",
        todo="Use a smaller parallel.tensor, or other packing of frozen weights.",
    )


class NF4LoraLinear(PackedLoraLinear):
    """PEFT's LoRA layer over an NF4Linear."""


def plain_linear(weight: Tensor, bias: Tensor | None, *, from_conv1d: bool) -> nn.Module:
    """An `nn.Linear`, or a `Conv1D`, around `weight` (out_features, in_features), which it keeps."""
    rows, columns = weight.shape
    layer: nn.Module
    with torch.device("meta"):
        if from_conv1d:
            layer, weight = Conv1D(rows, columns), weight.T.contiguous()
        else:
            layer = nn.Linear(columns, rows, bias=bias is not None)
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(weight.dtype, copy=True))
    return layer


class _PackedMatmul(torch.autograd.Function):
    """x @ W.T with W rebuilt on either way; what autograd keeps is the packed W alone (not even x: there is no dW)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, payload: Tensor, *scales: Tensor | None) -> Tensor:
        ctx.save_for_backward(payload, *scales)
        ctx.shape = shape
        return F.linear(x, NF4Weight(payload, BlockScales(*scales), shape).dequantise(x.dtype))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        payload, *scales = ctx.saved_tensors
        weight = NF4Weight(payload, BlockScales(*scales), ctx.shape).dequantise(grad.dtype)
        return grad @ weight, None, None, *(None for _ in scales)
