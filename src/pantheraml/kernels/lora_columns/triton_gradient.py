"""Adapter gradients as split-K matmuls over all rows: partial sums per program, reduced by a second kernel.

The gradients of A and B of a group of layers share one launch of each kernel: another launch would leave the GPU
partly idle for a few microseconds, hundreds of times per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.lora_columns import reference
from pantheraml.kernels.lora_columns.adapter_layout import BLOCK
from pantheraml.kernels.lora_columns.grad_operands import GradMatmul
from pantheraml.kernels.lora_columns.triton_kernel import pad_rank
from pantheraml.kernels.triton_support import DOT, INTERPRETED, ceil_div, launch, sm_limits

_PRESCALE = tl.constexpr(reference.PRESCALE)
_UNPRESCALE = tl.constexpr(2.0**120 / reference.PRESCALE)
_MAX_WIDTH, _MAX_ACCUMULATORS, _STEP, _SUM_WIDTH = 128, 16384, 64, 32
_MAX_SPLITS, _PROGRAMS, _STAGES, _MAX_RANKS = 8, 264, 4, 256


@triton.jit
def _load_left_operand(ptrs, row_scales, j, rank, m, row_end, SCALED: tl.constexpr):
    """Load the left operand [j, m] for `tl.dot`; multiply by the row scales if it was not prescaled."""
    values = tl.load(ptrs, mask=(j < rank) & (m[None, :] < row_end), other=0.0)
    if SCALED:
        values = values.to(tl.float32) * (tl.load(row_scales + m, mask=m < row_end, other=0.0) * _PRESCALE)[None, :]
    return values.to(DOT)


@triton.jit
def _partial_sum(
    tile, split, left, left_stride, row_scales, qdata, qdata_stride, blocks, partials, rows, width, rows_per_split,
    SCALED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """For each block (start, end, column, rank): partials[split, :, start:end] = left[column:] @ qdata[:, start:end]
    over the split's rows. TILES programs process WIDTH columns of a block each."""
    block = blocks + tile // TILES * 4
    start = tl.multiple_of(tl.load(block) + tile % TILES * WIDTH, 16)
    end_column = tl.multiple_of(tl.load(block + 1), 16)
    column, rank = tl.load(block + 2), tl.load(block + 3)
    w = start + tl.arange(0, WIDTH)
    row_begin = tl.multiple_of(split * rows_per_split, 16)
    row_end = tl.minimum(row_begin + rows_per_split, rows)
    total = tl.zeros((RANK, WIDTH), tl.float32)
    j = tl.arange(0, RANK)[:, None]
    left_ptrs = left + (column + j).to(tl.int64) * left_stride
    for row in range(row_begin, row_end, STEP):
        m = row + tl.arange(0, STEP)
        p = _load_left_operand(left_ptrs + m[None, :], row_scales, j, rank, m, row_end, SCALED)
        qdata_ptrs = qdata + m[:, None].to(tl.int64) * qdata_stride + w[None, :]
        x = tl.load(qdata_ptrs, mask=(m[:, None] < row_end) & (w[None, :] < end_column), other=0.0)
        total = tl.dot(p, x.to(DOT), total)
    tl.store(partials + (split * RANK + j).to(tl.int64) * width + w, total, mask=(j < rank) & (w[None, :] < end_column))


@triton.jit
def _bf16_of_pairs(pairs):
    """Convert the e4m3 values in the low and high bytes of 16-bit words to bf16, times 2**-120.

    Only shifts sign, exponent and mantissa bits, so it is exact, for subnormals too. NaN becomes a finite number, but
    quantization has set that row's scale to NaN.
    """
    if INTERPRETED:
        low = ((pairs << 8) & 0x8000) | ((pairs << 4) & 0x07F0)
        high = (pairs & 0x8000) | ((pairs >> 4) & 0x07F0)
        # as float32, whose upper half is bf16: the interpreter's cast from bf16 is wrong for subnormals
        low, high = low.to(tl.uint32) << 16, high.to(tl.uint32) << 16
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    # two words per instruction
    return tl.inline_asm_elementwise(
        """{ .reg .b32 s, t;
            shl.b32 s, $2, 8; shl.b32 t, $2, 4; and.b32 t, t, 0x07F007F0; lop3.b32 $0, s, 0x80008000, t, 0xEA;
            shr.u32 t, $2, 4; and.b32 t, t, 0x07F007F0; lop3.b32 $1, $2, 0x80008000, t, 0xEA; }""",
        "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _partial_sum_pairs(
    tile, split, left, left_stride, row_scales, pairs, pairs_stride, blocks, partials, rows, width, rows_per_split,
    SCALED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`_partial_sum` for e4m3 rows, read as 16-bit words of two values (`pairs_stride` counts words).

    The tensor cores' transposing loads work on 16-bit values, not bytes, and a cast from e4m3 takes several
    instructions where a shift takes one.
    """
    block = blocks + tile // TILES * 4
    start = tl.multiple_of(tl.load(block) + tile % TILES * WIDTH, 16)
    end_column = tl.multiple_of(tl.load(block + 1), 16)
    column, rank = tl.load(block + 2), tl.load(block + 3)
    pair = tl.arange(0, WIDTH // 2)[None, :]
    # not 2 * pair < ...: the compiler would not see that adjacent lanes agree, and would not vectorize the loads
    pair_mask = pair < tl.multiple_of((end_column - start) // 2, 8)
    row_begin = tl.multiple_of(split * rows_per_split, 16)
    row_end = tl.minimum(row_begin + rows_per_split, rows)
    even = tl.zeros((RANK, WIDTH // 2), tl.float32)
    odd = tl.zeros((RANK, WIDTH // 2), tl.float32)
    j = tl.arange(0, RANK)[:, None]
    k = tl.arange(0, STEP)
    left_ptrs = left + (column + j).to(tl.int64) * left_stride + (row_begin + k[None, :])
    qdata_ptrs = pairs + (row_begin + k[:, None]).to(tl.int64) * pairs_stride + (tl.multiple_of(start // 2, 8) + pair)
    for row in range(row_begin, row_end, STEP):
        p = _load_left_operand(left_ptrs, row_scales, j, rank, row + k, row_end, SCALED)
        low, high = _bf16_of_pairs(tl.load(qdata_ptrs, mask=(row + k[:, None] < row_end) & pair_mask, other=0))
        even = tl.dot(p, low.to(DOT), even)
        odd = tl.dot(p, high.to(DOT), odd)
        left_ptrs += STEP
        qdata_ptrs += STEP * pairs_stride
    w = start + tl.arange(0, WIDTH)[None, :]
    to = partials + (split * RANK + j).to(tl.int64) * width + w
    tl.store(to, tl.interleave(even, odd) * _UNPRESCALE, mask=(j < rank) & (w < end_column))


@triton.jit
def _partial_sums(
    left, left_stride, row_scales, qdata, qdata_stride, blocks, partials, rows, width, rows_per_split, tiles, programs,
    left_2, left_stride_2, row_scales_2, qdata_2, qdata_stride_2, blocks_2, partials_2, rows_2, width_2,
    rows_per_split_2, tiles_2,
    SCALED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
    SCALED_2: tl.constexpr, RANK_2: tl.constexpr, WIDTH_2: tl.constexpr, TILES_2: tl.constexpr,
    STEP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Two matmuls in one launch: the first `programs` programs run one, the rest the other."""
    program = tl.program_id(0)
    if program < programs:
        if PAIRS:
            _partial_sum_pairs(
                program % tiles, program // tiles, left, left_stride, row_scales, qdata, qdata_stride, blocks,
                partials, rows, width, rows_per_split, SCALED, RANK, WIDTH, TILES, STEP,
            )  # fmt: skip
        else:
            _partial_sum(
                program % tiles, program // tiles, left, left_stride, row_scales, qdata, qdata_stride, blocks,
                partials, rows, width, rows_per_split, SCALED, RANK, WIDTH, TILES, STEP,
            )  # fmt: skip
    else:
        other = program - programs
        if PAIRS:
            _partial_sum_pairs(
                other % tiles_2, other // tiles_2, left_2, left_stride_2, row_scales_2, qdata_2, qdata_stride_2,
                blocks_2, partials_2, rows_2, width_2, rows_per_split_2, SCALED_2, RANK_2, WIDTH_2, TILES_2, STEP,
            )  # fmt: skip
        else:
            _partial_sum(
                other % tiles_2, other // tiles_2, left_2, left_stride_2, row_scales_2, qdata_2, qdata_stride_2,
                blocks_2, partials_2, rows_2, width_2, rows_per_split_2, SCALED_2, RANK_2, WIDTH_2, TILES_2, STEP,
            )  # fmt: skip


@triton.jit
def _sum(
    tile, partials, splits, divisors, blocks, out, out_row, out_column, width,
    DIVIDED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[j, w] (strided) = the sum of the partial sums, divided by the divisor of column w."""
    block = blocks + tile // (BLOCK // WIDTH) * 4
    end_column = tl.multiple_of(tl.load(block + 1), 16)
    rank = tl.load(block + 3)
    w = tl.multiple_of(tl.load(block), 16) + tile % (BLOCK // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    j = tl.arange(0, RANK)
    mask = (j[:, None] < rank) & (w[None, :] < end_column)
    total = tl.zeros((RANK, WIDTH), tl.float32)
    for split in range(splits):
        total += tl.load(partials + (split * RANK + j[:, None]).to(tl.int64) * width + w[None, :], mask=mask, other=0.0)
    if DIVIDED:
        total /= tl.load(divisors + w, mask=w < end_column, other=1.0)[None, :]
    tl.store(out + j[:, None] * out_row + w[None, :] * out_column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sums(
    partials, splits, divisors, blocks, out, out_row, out_column, width, programs,
    partials_2, splits_2, divisors_2, blocks_2, out_2, out_row_2, out_column_2, width_2,
    DIVIDED: tl.constexpr, RANK: tl.constexpr, DIVIDED_2: tl.constexpr, RANK_2: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        _sum(program, partials, splits, divisors, blocks, out, out_row, out_column, width, DIVIDED, RANK, WIDTH, BLOCK)
    else:
        _sum(
            program - programs, partials_2, splits_2, divisors_2, blocks_2, out_2, out_row_2, out_column_2, width_2,
            DIVIDED_2, RANK_2, WIDTH, BLOCK,
        )  # fmt: skip


class _Plan(NamedTuple):
    """How one gradient matmul is split among programs."""

    matmul: GradMatmul
    partials: Tensor
    columns: int
    tiles: int
    """Tiles per block."""
    rows_per_split: int

    @property
    def scales(self) -> Tensor | None:
        """Row scales that the left operand does not include yet."""
        return None if self.matmul.left.prescaled else self.matmul.row_scales

    @property
    def all_tiles(self) -> int:
        """Tiles of all blocks."""
        return self.matmul.blocks.shape[0] * self.tiles

    @property
    def work(self) -> int:
        """Work per program, for ordering."""
        return self.rows_per_split * self.columns * self.partials.shape[1]

    def partial_arguments(self) -> tuple[Any, ...]:
        matmul, qdata = self.matmul, self.matmul.qdata
        source = qdata.view(torch.uint16) if qdata.dtype == torch.float8_e4m3fn else qdata
        return (
            matmul.left.rows, matmul.left.rows.stride(0), self.scales, source, source.stride(0), matmul.blocks,
            self.partials, qdata.shape[0], matmul.out.shape[1], self.rows_per_split, self.all_tiles,
        )  # fmt: skip

    def partial_constants(self) -> tuple[bool, int, int, int]:
        return self.scales is not None, self.partials.shape[1], self.columns, self.tiles

    def sum_arguments(self) -> tuple[Any, ...]:
        matmul, out = self.matmul, self.matmul.out
        return (
            self.partials, self.partials.shape[0], matmul.divisors, matmul.blocks, out, out.stride(0), out.stride(1),
            out.shape[1],
        )  # fmt: skip


def _plan(matmul: GradMatmul, programs: int = _PROGRAMS) -> _Plan:
    """Choose tiles and splits for about `programs` programs."""
    rows, padded = matmul.qdata.shape[0], pad_rank(matmul.rank)
    # fewer columns where the accumulators would not fit in registers
    widest = BLOCK if matmul.qdata.dtype == torch.float8_e4m3fn else _MAX_WIDTH
    columns = max(32, min(widest, _MAX_ACCUMULATORS // padded))
    tiles = BLOCK // columns
    splits = max(1, min(_MAX_SPLITS, programs // max(1, matmul.blocks.shape[0] * tiles), rows // 256))
    rows_per_split = ceil_div(ceil_div(rows, splits), _STEP) * _STEP
    partials = torch.empty(splits, padded, matmul.out.shape[1], dtype=torch.float32, device=matmul.out.device)
    return _Plan(matmul, partials, columns, tiles, rows_per_split)


def _stages(plans: Sequence[_Plan]) -> int:
    """Pipeline stages that fit in shared memory, which may hold the operands of both matmuls."""
    _, shared_memory = sm_limits(plans[0].matmul.qdata.device)
    stage = sum(
        _STEP * (p.partials.shape[1] * p.matmul.left.rows.element_size() + p.columns * p.matmul.qdata.element_size())
        for p in plans
    )
    return max(2, min(_STAGES, shared_memory // stage))


def gradients(first: GradMatmul, second: GradMatmul) -> None:
    for start in range(0, max(first.rank, second.rank), _MAX_RANKS):
        _gradients(_rank_slice(first, start), _rank_slice(second, start))


def _rank_slice(matmul: GradMatmul, start: int) -> GradMatmul:
    """Restrict the matmul to at most _MAX_RANKS ranks from `start` on."""
    if matmul.rank <= _MAX_RANKS:
        return matmul if start == 0 else matmul._replace(blocks=matmul.blocks[:0], rank=1)
    table = matmul.blocks.clone()
    table[:, 2] += start
    table[:, 3] = (table[:, 3] - start).clamp(0, _MAX_RANKS)
    return matmul._replace(blocks=table, rank=min(_MAX_RANKS, max(1, matmul.rank - start)), out=matmul.out[start:])


def _plans(first: GradMatmul, second: GradMatmul) -> list[_Plan]:
    """Plan both matmuls. If the first has so many ranks that at most two programs fit on an SM, shrink the second's
    grid so that all programs run at once (q, k and v of an 8B model, 8,192 rows on an H200: 48 instead of 53 us). But
    not below four splits: longer accumulations on the tensor cores are less accurate."""
    one, two = _plan(first), _plan(second)
    if one.partials.shape[1] <= 32:
        return [one, two]
    smaller = _plan(second, _PROGRAMS - one.all_tiles * one.partials.shape[0])
    return [one, smaller if smaller.partials.shape[0] >= 4 else two]


def _gradients(first: GradMatmul, second: GradMatmul) -> None:
    # longest programs first (gate and up of an 8B model, 8,192 rows on an H200: 87 instead of 102 us)
    a, b = plans = sorted(_plans(first, second), key=lambda plan: plan.work, reverse=True)
    programs = [plan.all_tiles * plan.partials.shape[0] for plan in plans]
    (scaled, rank, width, tiles), (scaled_2, rank_2, width_2, tiles_2) = (p.partial_constants() for p in plans)
    launch(
        _partial_sums, (sum(programs),), *a.partial_arguments(), programs[0], *b.partial_arguments(),
        SCALED=scaled, RANK=rank, WIDTH=width, TILES=tiles,
        SCALED_2=scaled_2, RANK_2=rank_2, WIDTH_2=width_2, TILES_2=tiles_2,
        STEP=_STEP, PAIRS=first.qdata.dtype == torch.float8_e4m3fn,
        num_warps=4, num_stages=_stages(plans),
    )  # fmt: skip
    programs = [plan.matmul.blocks.shape[0] * (BLOCK // _SUM_WIDTH) for plan in plans]
    launch(
        _sums, (sum(programs),), *a.sum_arguments(), programs[0], *b.sum_arguments(),
        DIVIDED=a.matmul.divisors is not None, RANK=rank, DIVIDED_2=b.matmul.divisors is not None, RANK_2=rank_2,
        WIDTH=_SUM_WIDTH, BLOCK=BLOCK,
    )  # fmt: skip
