"""The number format that all nf4 ops share: about 4.13 bits a value.

A weight is cut into blocks of 64 values. Each block keeps its largest magnitude, and each value the nearest of 16
levels that are equally likely under a normal distribution (QLoRA, arXiv 2305.14314). The magnitudes are quantised
again, to 8 bits in blocks of 256, between that block's smallest and largest. Every reduction here is a minimum or a
maximum, so the packed weight is the same on CPU and GPU.

This is the plain torch reference, for any device. Packing and unpacking go through the weight in pieces, so that no
float32 copy of a whole weight ever exists.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
SCALE_BLOCK = 256
PIECE = 1 << 24
"""Values packed or unpacked at once: 64 MiB in float32, and few enough kernel launches for the largest layers."""

# QLoRA, appendix E: 8 quantiles above zero, zero itself, and 7 below, scaled to end at +-1
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
    """The levels on a device, copied there once; not to be written to."""
    return nf4_levels().to(device)


@functools.cache
def midpoints_on(device: torch.device) -> Tensor:
    """Where one level's neighbourhood ends and the next one's begins; not to be written to."""
    levels = nf4_levels()
    return ((levels[1:] + levels[:-1]) / 2).to(device)


@functools.cache
def _byte_to_pair(device: torch.device) -> Tensor:
    """One packed byte -> its two levels: half the look-ups, and no unpacked indices in memory."""
    levels = nf4_levels()
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).to(device)


class BlockScales(NamedTuple):
    """The magnitude of each block: `table[code] * step + low`, or `code` itself where that is float32.

    `step` and `low` have one value per 256 blocks. Without a table the codes are the numbers 0 to 255; checkpoints that
    were packed elsewhere bring a table of their own, or magnitudes that were not quantised again.
    """

    code: Tensor
    table: Tensor | None = None
    step: Tensor | None = None
    low: Tensor | None = None

    def values(self) -> Tensor:
        """[blocks] float32."""
        if self.step is None or self.low is None:
            return self.code
        codes = self.code.float() if self.table is None else self.table[self.code.int()]
        return (blocks_of(codes, SCALE_BLOCK) * self.step[:, None] + self.low[:, None]).flatten()[: self.code.numel()]


class NF4Weight(NamedTuple):
    """A packed weight of `shape` (out_features, in_features)."""

    payload: Tensor
    """Two 4-bit codes a byte, the first one in the high half."""
    scales: BlockScales
    shape: torch.Size

    @classmethod
    def pack(cls, weight: Tensor) -> NF4Weight:
        flat = weight.detach().flatten()
        blocks = -(-flat.numel() // BLOCK)
        payload = torch.empty(blocks * BLOCK // 2, dtype=torch.uint8, device=flat.device)
        scales = torch.empty(blocks, dtype=torch.float32, device=flat.device)
        for start in range(0, flat.numel(), PIECE):
            first = start // BLOCK
            codes, magnitudes = _pack_piece(flat[start : start + PIECE])
            payload[first * BLOCK // 2 :][: codes.numel()] = codes
            scales[first:][: magnitudes.numel()] = magnitudes
        return cls(payload, _pack_scales(scales), weight.shape)

    @classmethod
    def of_codes(cls, codes: Tensor, scales: BlockScales) -> NF4Weight:
        """Of the levels with these numbers, uint8 of the weight's shape."""
        return cls(_pairs(blocks_of(codes.flatten(), BLOCK)), scales, codes.shape)

    def codes(self) -> Tensor:
        """Numbers of levels, uint8, of the weight's shape."""
        both = torch.stack([self.payload >> 4, self.payload & 15], dim=1)
        return both.flatten()[: self.shape.numel()].view(self.shape)

    def magnitudes(self) -> Tensor:
        """Of the block that each value is in, `shape`."""
        return self.scales.values().repeat_interleave(BLOCK)[: self.shape.numel()].view(self.shape)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        size = self.shape.numel()
        scales = self.scales.values()
        dense = torch.empty(size, dtype=dtype, device=self.payload.device)
        for start in range(0, size, PIECE):
            piece = dense[start : start + PIECE]
            codes = self.payload[start // 2 : (start + piece.numel() + 1) // 2].int()
            values = blocks_of(F.embedding(codes, _byte_to_pair(codes.device)).flatten(), BLOCK)
            values.mul_(scales[start // BLOCK :][: values.shape[0], None])
            piece.copy_(values.flatten()[: piece.numel()])
        return dense.view(self.shape)


def _pack_piece(flat: Tensor) -> tuple[Tensor, Tensor]:
    """A run of values -> bytes of two codes, and the largest magnitude of each block."""
    blocks = blocks_of(flat.float(), BLOCK)
    scales = blocks.abs().amax(dim=1)
    return _pairs(nearest_codes(blocks, scales)), scales


def nearest_codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers of the levels nearest to blocks [blocks, 64] of these magnitudes, uint8."""
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return torch.bucketize(blocks / safe[:, None], midpoints_on(blocks.device), out_int32=True).to(torch.uint8)


def _pairs(codes: Tensor) -> Tensor:
    """Two codes a byte."""
    first, second = codes.flatten().view(-1, 2).unbind(dim=1)
    return (first << 4) | second


def storable_scales(magnitudes: Tensor) -> BlockScales:
    """Magnitudes of blocks in the form that bitsandbytes stores: 8-bit codes, of which a table makes numbers from -1 to
    1, times the largest deviation of each 256 blocks, and one mean for all."""
    mean = magnitudes.mean()
    blocks = blocks_of(magnitudes - mean, SCALE_BLOCK)
    largest = blocks.abs().amax(dim=1)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    codes = ((blocks / safe[:, None] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    table = torch.linspace(-1, 1, 256, device=magnitudes.device)
    return BlockScales(codes.flatten()[: magnitudes.numel()].clone(), table, largest, mean.expand_as(largest).clone())


def _pack_scales(scales: Tensor) -> BlockScales:
    """Block magnitudes -> 8-bit codes, and the smallest value and the step of each block of 256."""
    # padded with its own last value, so that the padding widens no block's range
    padding = -scales.numel() % SCALE_BLOCK
    blocks = torch.cat([scales, scales[-1:].expand(padding)]).view(-1, SCALE_BLOCK)
    low, high = blocks.aminmax(dim=1)
    # by a tensor: CUDA divides by a number with its rounded inverse, and the GPU's packing would differ from the CPU's
    step = (high - low) / torch.full_like(high, 255)
    safe = torch.where(step > 0, step, torch.ones_like(step))
    codes = ((blocks - low[:, None]) / safe[:, None]).round().clamp(0, 255).to(torch.uint8)
    return BlockScales(codes.flatten()[: scales.numel()].clone(), step=step, low=low)


def blocks_of(flat: Tensor, size: int) -> Tensor:
    """[blocks, size], the last one filled up with zeros."""
    return F.pad(flat, (0, -flat.numel() % size)).view(-1, size)
