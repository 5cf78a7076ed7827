"""Each program converts _TILE NF4 blocks: consecutive ones, or a column of blocks for a transposed output.

The 16 levels are looked up in memory. They fit in one cache line, so a warp's 32 lookups are one access.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.nf4.format import BLOCK, SCALE_BLOCK, NF4Weight, levels_on
from pantheraml.kernels.triton_support import ceil_div, launch, to_e4m3

_TILE = 128


@triton.jit
def _magnitudes(code, table, step, low, block, mask, NESTED: tl.constexpr, TABLE: tl.constexpr, PER: tl.constexpr):
    """Equivalent of `BlockScales.values` for the given blocks."""
    values = tl.load(code + block, mask=mask, other=0)
    if TABLE:
        values = tl.load(table + values.to(tl.int32))
    if NESTED:
        group = block // PER
        values = values.to(tl.float32) * tl.load(step + group, mask=mask, other=0.0)
        values += tl.load(low + group, mask=mask, other=0.0)
    return values


@triton.jit
def _nf4_to_fp8(
    qdata, code, table, step, low, levels, row_scales, out, out_row, out_column, rows, blocks_per_row,
    NESTED: tl.constexpr, TABLE: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, PER: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    if TRANSPOSED:
        row = tl.program_id(1) * TILE + tl.arange(0, TILE)
        column = tl.program_id(0)
        block = row * blocks_per_row + column
    else:
        block = tl.program_id(0) * TILE + tl.arange(0, TILE)
        row = block // blocks_per_row
        column = block % blocks_per_row
    mask = row < rows
    scale = _magnitudes(code, table, step, low, block, mask, NESTED, TABLE, PER)
    inverse = 1.0 / tl.load(row_scales + row, mask=mask, other=1.0)
    ptrs = qdata + block[:, None].to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    pairs = tl.load(ptrs, mask=mask[:, None], other=0).to(tl.int32)
    values = tl.interleave(tl.load(levels + (pairs >> 4)), tl.load(levels + (pairs & 15)))
    e4m3 = to_e4m3(values * scale[:, None] * inverse[:, None]).to(tl.uint8, bitcast=True)
    k = tl.arange(0, BLOCK)
    if TRANSPOSED:
        to = out + (column * BLOCK + k[:, None]).to(tl.int64) * out_column + row[None, :]
        tl.store(to, tl.trans(e4m3), mask=mask[None, :])
    else:
        to = out + row[:, None].to(tl.int64) * out_row + (column * BLOCK)[:, None] + k[None, :]
        tl.store(to, e4m3, mask=mask[:, None])


def nf4_to_fp8(weight: NF4Weight, row_scales: Tensor, out: Tensor) -> None:
    rows, columns = weight.shape
    code, table, step, low = weight.scales
    blocks_per_row, row_tiles = columns // BLOCK, ceil_div(rows, _TILE)
    transposed = out.stride(1) != 1
    launch(
        _nf4_to_fp8, (blocks_per_row, row_tiles) if transposed else (ceil_div(rows * blocks_per_row, _TILE),),
        weight.qdata, code, table, step, low, levels_on(out.device), row_scales, out.view(torch.uint8), *out.stride(),
        rows, blocks_per_row,
        NESTED=step is not None, TABLE=table is not None, TRANSPOSED=transposed, BLOCK=BLOCK, PER=SCALE_BLOCK,
        TILE=_TILE,
    )  # fmt: skip
