"""The NF4 format shared by the nf4 ops: about 4.13 bits per value (QLoRA, arXiv 2305.14314).

A weight is split into blocks of 64 values. Each block stores its absmax, and each value the nearest of 16 levels that
are equally likely under a normal distribution. With double quantization, the absmax values are quantized to 8 bits in
blocks of 256, between each block's minimum and maximum. Every reduction here is a minimum or a maximum, so the
quantized weight is identical on CPU and GPU.

This is the torch reference, for any device. Quantization and dequantization run in chunks, so that a float32 copy of a
whole weight never exists.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
SCALE_BLOCK = 256
CHUNK = 1 << 24
"""Values (de)quantized at a time: 64 MiB in float32, and few enough kernel launches for the largest layers."""

# QLoRA, appendix E: 8 quantiles above zero, zero itself, and 7 below, normalized to [-1, 1]
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def nf4_levels() -> Tensor:
    """The 16 levels in [-1, 1], ascending."""
    return torch.tensor(_LEVELS, dtype=torch.float32)


@functools.cache
def levels_on(device: torch.device) -> Tensor:
    """The levels on a device (cached; do not modify)."""
    return nf4_levels().to(device)


@functools.cache
def midpoints_on(device: torch.device) -> Tensor:
    """Midpoints between adjacent levels, the rounding boundaries (cached; do not modify)."""
    levels = nf4_levels()
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@functools.cache
def _byte_to_pair(device: torch.device) -> Tensor:
    """Lookup table from a byte to its two levels: half the lookups, and no unpacked indices in memory."""
    levels = nf4_levels()
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).to(device)


class BlockScales(NamedTuple):
    """Absmax of each block: `table[code] * step + low`, or `code` itself if it is float32.

    `step` and `low` have one value per 256 blocks. Without a table the codes are the numbers 0 to 255. Checkpoints
    quantized by other tools have their own table, or an absmax without double quantization.
    """

    code: Tensor
    table: Tensor | None = None
    step: Tensor | None = None
    low: Tensor | None = None

    def values(self) -> Tensor:
        """Dequantized absmax, [blocks] float32."""
        if self.step is None or self.low is None:
            return self.code
        codes = self.code.float() if self.table is None else self.table[self.code.int()]
        return (blocks_of(codes, SCALE_BLOCK) * self.step[:, None] + self.low[:, None]).flatten()[: self.code.numel()]


class NF4Weight(NamedTuple):
    """A quantized weight of `shape` (out_features, in_features)."""

    qdata: Tensor
    """Two 4-bit codes per byte, the first in the high nibble."""
    scales: BlockScales
    shape: torch.Size

    @classmethod
    def quantize(cls, weight: Tensor) -> NF4Weight:
        flat = weight.detach().flatten()
        blocks = -(-flat.numel() // BLOCK)
        qdata = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=flat.device)
        scales = torch.empty(blocks, dtype=torch.float32, device=flat.device)
        for start in range(0, flat.numel(), CHUNK):
            first_block = start // BLOCK
            codes, magnitudes = _quantize_chunk(flat[start : start + CHUNK])
            qdata[first_block * BLOCK // 2 :][: codes.numel()] = codes
            scales[first_block:][: magnitudes.numel()] = magnitudes
        return cls(qdata, _quantize_scales(scales), weight.shape)

    @classmethod
    def from_codes(cls, codes: Tensor, scales: BlockScales) -> NF4Weight:
        """Build from level indices, uint8 of the weight's shape."""
        return cls(_pack_nibbles(blocks_of(codes.flatten(), BLOCK)), scales, codes.shape)

    def codes(self) -> Tensor:
        """Level indices, uint8 of the weight's shape."""
        nibbles = torch.stack([self.qdata >> 4, self.qdata & 15], dim=1)
        return nibbles.flatten()[: self.shape.numel()].view(self.shape)

    def magnitudes(self) -> Tensor:
        """Absmax of each value's block, broadcast to `shape`."""
        return self.scales.values().repeat_interleave(BLOCK)[: self.shape.numel()].view(self.shape)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        size = self.shape.numel()
        scales = self.scales.values()
        dense = torch.empty(size, dtype=dtype, device=self.qdata.device)
        for start in range(0, size, CHUNK):
            chunk = dense[start : start + CHUNK]
            codes = self.qdata[start // 2 : (start + chunk.numel() + 1) // 2].int()
            values = blocks_of(F.embedding(codes, _byte_to_pair(codes.device)).flatten(), BLOCK)
            values.mul_(scales[start // BLOCK :][: values.shape[0], None])
            chunk.copy_(values.flatten()[: chunk.numel()])
        return dense.view(self.shape)


def _quantize_chunk(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a flat chunk: packed codes and the absmax of each block."""
    blocks = blocks_of(flat.float(), BLOCK)
    scales = blocks.abs().amax(dim=1)
    return _pack_nibbles(nearest_codes(blocks, scales)), scales


def nearest_codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Indices (uint8) of the levels nearest to `blocks` [blocks, 64], given each block's absmax."""
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    return torch.bucketize(blocks / divisor[:, None], midpoints_on(blocks.device), out_int32=True).to(torch.uint8)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Pack two codes per byte."""
    high, low = codes.flatten().view(-1, 2).unbind(dim=1)
    return (high << 4) | low


def storable_scales(magnitudes: Tensor) -> BlockScales:
    """Quantize block absmax values in bitsandbytes' storage format.

    8-bit codes index a table from -1 to 1, multiplied by the largest deviation of each 256 blocks, plus one mean.
    """
    mean = magnitudes.mean()
    blocks = blocks_of(magnitudes - mean, SCALE_BLOCK)
    largest = blocks.abs().amax(dim=1)
    divisor = torch.where(largest > 0, largest, torch.ones_like(largest))
    codes = ((blocks / divisor[:, None] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    table = torch.linspace(-1, 1, 256, device=magnitudes.device)
    return BlockScales(codes.flatten()[: magnitudes.numel()].clone(), table, largest, mean.expand_as(largest).clone())


def _quantize_scales(scales: Tensor) -> BlockScales:
    """Quantize block absmax values to 8-bit codes, with a minimum and a step per block of 256."""
    # pad with the last value, so that the padding does not widen a block's range
    padding = -scales.numel() % SCALE_BLOCK
    blocks = torch.cat([scales, scales[-1:].expand(padding)]).view(-1, SCALE_BLOCK)
    low, high = blocks.aminmax(dim=1)
    # Divide by a tensor: CUDA divides by a scalar with its rounded inverse, and GPU codes would differ from CPU codes.
    step = (high - low) / torch.full_like(high, 255)
    divisor = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((blocks - low[:, None]) / divisor[:, None]).round().clamp(0, 255).to(torch.uint8)
    return BlockScales(codes.flatten()[: scales.numel()].clone(), step=step, low=low)


def blocks_of(flat: Tensor, size: int) -> Tensor:
    """Reshape to [blocks, size], zero-padding the last block."""
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)
