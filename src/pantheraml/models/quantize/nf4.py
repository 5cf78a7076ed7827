"""Frozen linear layers in NF4, about 4.13 bits per value (format: `kernels.nf4.format`).

The weight lives in buffers and has no gradient. Forward and backward dequantize it and drop it again; autograd saves
only the quantized form. This is the portable path for any device; `models.fast` has a faster one for GPUs with fp8.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.nf4.format import BLOCK, SCALE_BLOCK, BlockScales, NF4Weight
from pantheraml.models.quantize.quantized_lora import QuantizedLoraLinear


class NF4Linear(nn.Module):
    """A frozen `nn.Linear` (or GPT-2's transposed `Conv1D`) with its weight in NF4."""

    qweight: Tensor
    """Two 4-bit codes per byte. PEFT finds a layer's device by this name."""
    scale_code: Tensor
    scale_table: Tensor | None
    scale_step: Tensor | None
    scale_low: Tensor | None
    bias: Tensor | None
    dense_dtype = torch.bfloat16
    """Dtype when dequantized to a plain layer."""

    def __init__(self, weight: Tensor | NF4Weight, bias: Tensor | None, *, from_conv1d: bool = False) -> None:
        """`weight` is (out_features, in_features), dense or already quantized."""
        super().__init__()
        quantized = weight if isinstance(weight, NF4Weight) else NF4Weight.quantize(weight)
        self.out_features, self.in_features = quantized.shape
        self.from_conv1d = from_conv1d
        self.register_buffer("qweight", quantized.qdata)
        for name, buffer in quantized.scales._asdict().items():
            self.register_buffer(f"scale_{name}", buffer)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def quantized_weight(self) -> NF4Weight:
        scales = BlockScales(self.scale_code, self.scale_table, self.scale_step, self.scale_low)
        return NF4Weight(self.qweight, scales, torch.Size((self.out_features, self.in_features)))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight as the forward uses it, (out_features, in_features)."""
        return self.quantized_weight().dequantize(dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """Dequantize to a plain layer of the original kind."""
        return plain_linear(self.dequantize(dtype), self.bias, from_conv1d=self.from_conv1d)

    def keep_rows(self, rows: slice) -> None:
        """Keep only these output rows."""
        first, last = rows.start * self.in_features, rows.stop * self.in_features
        if first % BLOCK or (last % BLOCK and rows.stop < self.out_features):
            raise _splits_block_error(f"{rows.stop - rows.start} outputs of {self.in_features} inputs")
        blocks = slice(first // BLOCK, -(-last // BLOCK))
        qdata = self.qweight[blocks.start * BLOCK // 2 : blocks.stop * BLOCK // 2].clone()
        self._set_weight(qdata, _slice_scales(self.quantized_weight().scales, blocks))
        self.bias = None if self.bias is None else self.bias[rows].clone()
        self.out_features = rows.stop - rows.start

    def keep_columns(self, columns: slice) -> None:
        """Keep only these input columns. The bias is unchanged."""
        if self.in_features % BLOCK or columns.start % BLOCK or columns.stop % BLOCK:
            raise _splits_block_error(f"{columns.stop - columns.start} of {self.in_features} inputs")
        codes = self.qweight.view(self.out_features, -1)[:, columns.start // 2 : columns.stop // 2]
        # Each row loses blocks, so blocks that shared a second-level scale are no longer adjacent.
        absmax = self.quantized_weight().scales.values().view(self.out_features, -1)
        absmax = absmax[:, columns.start // BLOCK : columns.stop // BLOCK]
        self._set_weight(codes.flatten().clone(), BlockScales(absmax.flatten().clone()))
        self.in_features = columns.stop - columns.start

    def _set_weight(self, qdata: Tensor, scales: BlockScales) -> None:
        self.qweight = qdata
        for name, buffer in scales._asdict().items():
            setattr(self, f"scale_{name}", buffer)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        weight = self.quantized_weight()
        out: Tensor = _NF4Matmul.apply(x.to(dtype), weight.shape, weight.qdata, *weight.scales)
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _slice_scales(scales: BlockScales, blocks: slice) -> BlockScales:
    """Return the scales of these blocks: double-quantized if the first block starts a second-level group, else as
    floats (0.37 more bits per value)."""
    if scales.step is None or scales.low is None or blocks.start % SCALE_BLOCK:
        return BlockScales(scales.values()[blocks].clone())
    steps = slice(blocks.start // SCALE_BLOCK, -(-blocks.stop // SCALE_BLOCK))
    return BlockScales(scales.code[blocks].clone(), scales.table, scales.step[steps].clone(), scales.low[steps].clone())


def _splits_block_error(part: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"An nf4 layer cannot be sharded to {part}: that splits a block of {BLOCK} values that share a scale.",
        fix="Use a smaller parallel.tensor, or another quantization of the frozen weights.",
    )


class NF4LoraLinear(QuantizedLoraLinear):
    """PEFT's LoRA layer over an NF4Linear."""


def plain_linear(weight: Tensor, bias: Tensor | None, *, from_conv1d: bool) -> nn.Module:
    """Wrap `weight` (out_features, in_features), without copying it, in an `nn.Linear` or a `Conv1D`."""
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


class _NF4Matmul(torch.autograd.Function):
    """x @ W.T, dequantizing W in forward and backward. Autograd saves only the quantized W (not even x: there is no
    dW)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: torch.Size, qdata: Tensor, *scales: Tensor | None) -> Tensor:
        ctx.save_for_backward(qdata, *scales)
        ctx.shape = shape
        return F.linear(x, NF4Weight(qdata, BlockScales(*scales), shape).dequantize(x.dtype))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        qdata, *scales = ctx.saved_tensors
        weight = NF4Weight(qdata, BlockScales(*scales), ctx.shape).dequantize(grad.dtype)
        return grad @ weight, None, None, *(None for _ in scales)
