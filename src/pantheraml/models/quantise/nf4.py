"""NF4: linear layers whose frozen weight takes about 4.13 bits a value.

A weight is cut into blocks of 64 values. Each block keeps its largest magnitude, and each value the nearest of 16
levels that are equally likely under a normal distribution (QLoRA, arXiv 2305.14314). The magnitudes are quantised
again, to 8 bits in blocks of 256, between that block's smallest and largest. Every reduction here is a minimum or a
maximum, so the packed weight is the same on CPU and GPU.

The weight lives in buffers and has no gradient. Forward and backward rebuild it when they need it and drop it again:
autograd keeps the packed form. This is the plain torch reference, for any device.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from pantheraml.models.quantise.lora import PackedLoraLinear

BLOCK = 64
SCALE_BLOCK = 256


def nf4_levels() -> Tensor:
    """The 16 levels in [-1, 1], ascending: 8 quantiles above zero, zero itself, and 7 below, scaled to end at +-1."""
    # Half a step is left at either end, averaged over the 15 and the 16 steps that either side would have alone.
    tail = 1 - (1 / 30 + 1 / 32) / 2
    above = torch.special.ndtri(torch.linspace(tail, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(tail, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    return (levels / levels.max()).float()


@functools.cache
def _midpoints(device: torch.device) -> Tensor:
    levels = nf4_levels()
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@functools.cache
def _byte_to_pair(device: torch.device) -> Tensor:
    """One packed byte -> its two levels: half the look-ups, and no unpacked indices in memory."""
    levels = nf4_levels()
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).to(device)


class NF4Linear(nn.Module):
    """A frozen `nn.Linear` (or GPT-2's `Conv1D`, which is one with its weight transposed) with its weight in NF4."""

    qweight: Tensor
    """Two 4-bit codes a byte. PEFT finds a layer's device by this name."""
    scale_code: Tensor
    scale_low: Tensor
    scale_step: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, *, from_conv1d: bool = False) -> None:
        """`weight` is dense, (out_features, in_features)."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.from_conv1d = from_conv1d
        qweight, scales = _pack(weight.detach().float())
        code, low, step = _pack_scales(scales)
        self.register_buffer("qweight", qweight)
        self.register_buffer("scale_code", code)
        self.register_buffer("scale_low", low)
        self.register_buffer("scale_step", step)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    @classmethod
    def from_linear(cls, layer: nn.Module, *, device: torch.device | None = None) -> NF4Linear:
        """Packs `layer`'s weight, on `device` if given: only this one layer is ever dense there."""
        from_conv1d = isinstance(layer, Conv1D)
        weight = cast(Tensor, layer.weight).detach().to(device)
        bias = cast("Tensor | None", layer.bias)
        return cls(
            weight.T if from_conv1d else weight,
            None if bias is None else bias.detach().to(device),
            from_conv1d=from_conv1d,
        )

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as the forward pass sees it, (out_features, in_features)."""
        return _unpack(*self._packed(), self._shape, dtype)

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """A plain layer of the kind this one was made from, with the weight that NF4 left of the original."""
        weight = self.dequantise(dtype)
        layer: nn.Module
        with torch.device("meta"):
            if self.from_conv1d:
                layer, weight = Conv1D(self.out_features, self.in_features), weight.T.contiguous()
            else:
                layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(weight)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.to(dtype, copy=True))
        return layer

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        out: Tensor = _PackedMatmul.apply(x.to(dtype), *self._packed(), self._shape)
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    @property
    def _shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    def _packed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.qweight, self.scale_code, self.scale_low, self.scale_step


class NF4LoraLinear(PackedLoraLinear):
    """PEFT's LoRA layer over an NF4Linear."""


def quantise_linears(model: Any, *, device: torch.device | None = None) -> int:
    """Packs every linear layer of a transformers model but its output head, one by one; how many there were."""
    head = model.get_output_embeddings()
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    for name, layer in found:
        model.set_submodule(name, NF4Linear.from_linear(layer, device=device))
    return len(found)


def dequantise_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """The way back, as far as there is one: plain layers with the weights that NF4 left. How many there were."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, NF4Linear)]
    for name, layer in found:
        model.set_submodule(name, layer.to_linear(dtype))
    return len(found)


class _PackedMatmul(torch.autograd.Function):
    """x @ W.T with W rebuilt on either way; what autograd keeps is the packed W alone (not even x: there is no dW)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, qweight: Tensor, code: Tensor, low: Tensor, step: Tensor, shape: torch.Size
    ) -> Tensor:
        ctx.save_for_backward(qweight, code, low, step)
        ctx.shape = shape
        return F.linear(x, _unpack(qweight, code, low, step, shape, x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad,) = grads
        qweight, code, low, step = ctx.saved_tensors
        return grad @ _unpack(qweight, code, low, step, ctx.shape, grad.dtype), None, None, None, None, None


def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Dense float32 weight -> bytes of two codes, and the largest magnitude of each block."""
    blocks = _blocks(weight.flatten(), BLOCK)
    scales = blocks.abs().amax(dim=1)
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = torch.bucketize(blocks / safe[:, None], _midpoints(weight.device), out_int32=True).to(torch.uint8)
    first, second = codes.flatten().view(-1, 2).unbind(dim=1)
    return (first << 4) | second, scales


def _pack_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block magnitudes -> 8-bit codes, and the smallest value and the step of each block of 256."""
    # padded with its own last value, so that the padding widens no block's range
    padding = -scales.numel() % SCALE_BLOCK
    blocks = torch.cat([scales, scales[-1:].expand(padding)]).view(-1, SCALE_BLOCK)
    low, high = blocks.aminmax(dim=1)
    # by a tensor: CUDA divides by a number with its rounded inverse, and the GPU's packing would differ from the CPU's
    step = (high - low) / torch.full_like(high, 255)
    safe = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((blocks - low[:, None]) / safe[:, None]).round().clamp(0, 255).to(torch.uint8)
    return codes.flatten()[: scales.numel()].clone(), low, step


def _unpack(qweight: Tensor, code: Tensor, low: Tensor, step: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    values = F.embedding(qweight.int(), _byte_to_pair(qweight.device)).view(-1, BLOCK)
    scale_blocks = _blocks(code.float(), SCALE_BLOCK) * step[:, None] + low[:, None]
    values.mul_(scale_blocks.flatten()[: code.numel(), None])
    return values.flatten()[: shape.numel()].view(shape).to(dtype)


def _blocks(flat: Tensor, size: int) -> Tensor:
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)
