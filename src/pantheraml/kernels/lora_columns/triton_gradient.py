"""The adapters' gradients: sums over all rows, of which every program takes a share; then the shares are added up.

What belongs together, the gradients of A and of B of a group of layers, is one launch of each kernel: a launch more
takes a few microseconds in which the GPU is not full, and there are hundreds in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.lora_columns import reference
from pantheraml.kernels.lora_columns.sides import Side
from pantheraml.kernels.lora_columns.spans import BLOCK
from pantheraml.kernels.lora_columns.triton_kernel import at_least_16
from pantheraml.kernels.triton_support import DOT, INTERPRETED, ceil_div, launch, processors

_LIFT = tl.constexpr(reference.LIFT)
_UNLIFT = tl.constexpr(2.0**120 / reference.LIFT)
_WIDTH, _SUMS, _STEP, _GATHER_WIDTH = 128, 16384, 64, 32
_SPLITS, _PROGRAMS, _STAGES, _RANKS = 8, 264, 4, 256


@triton.jit
def _load_left(at, row_scales, j, rank, m, end, SCALED: tl.constexpr):
    """[j, m] for a product; lifted here where it was not."""
    values = tl.load(at, mask=(j < rank) & (m[None, :] < end), other=0.0)
    if SCALED:
        values = values.to(tl.float32) * (tl.load(row_scales + m, mask=m < end, other=0.0) * _LIFT)[None, :]
    return values.to(DOT)


@triton.jit
def _share(
    piece, split, left, left_stride, row_scales, payload, payload_stride, blocks, parts, rows, width, share,
    SCALED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """For block (start, end, column, rank): parts[split, :, start:end] = left[column:] @ payload[:, start:end], over
    the split's share of the rows. PIECES programs take WIDTH columns of a block each."""
    block = blocks + piece // PIECES * 4
    start = tl.multiple_of(tl.load(block) + piece % PIECES * WIDTH, 16)
    end_column = tl.multiple_of(tl.load(block + 1), 16)
    column, rank = tl.load(block + 2), tl.load(block + 3)
    w = start + tl.arange(0, WIDTH)
    begin = tl.multiple_of(split * share, 16)
    end = tl.minimum(begin + share, rows)
    total = tl.zeros((RANK, WIDTH), tl.float32)
    j = tl.arange(0, RANK)[:, None]
    of = left + (column + j).to(tl.int64) * left_stride
    for first in range(begin, end, STEP):
        m = first + tl.arange(0, STEP)
        p = _load_left(of + m[None, :], row_scales, j, rank, m, end, SCALED)
        at = payload + m[:, None].to(tl.int64) * payload_stride + w[None, :]
        x = tl.load(at, mask=(m[:, None] < end) & (w[None, :] < end_column), other=0.0)
        total = tl.dot(p, x.to(DOT), total)
    tl.store(parts + (split * RANK + j).to(tl.int64) * width + w, total, mask=(j < rank) & (w[None, :] < end_column))


@triton.jit
def _bf16_of_pairs(pairs):
    """The e4m3 values in the low and in the high bytes of 16-bit words, each times 2**-120, as bf16.

    Sign, exponent and mantissa only change places, so that is exact, for subnormals too. A NaN becomes a number: who
    quantised it has made its row's scale NaN."""
    if INTERPRETED:
        low = ((pairs << 8) & 0x8000) | ((pairs << 4) & 0x07F0)
        high = (pairs & 0x8000) | ((pairs >> 4) & 0x07F0)
        # in float32, whose upper half bf16 is: the interpreter's cast from bf16 is wrong for subnormals
        low, high = low.to(tl.uint32) << 16, high.to(tl.uint32) << 16
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    # two words at once
    return tl.inline_asm_elementwise(
        """{ .reg .b32 s, t;
            shl.b32 s, $2, 8; shl.b32 t, $2, 4; and.b32 t, t, 0x07F007F0; lop3.b32 $0, s, 0x80008000, t, 0xEA;
            shr.u32 t, $2, 4; and.b32 t, t, 0x07F007F0; lop3.b32 $1, $2, 0x80008000, t, 0xEA; }""",
        "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _share_of_pairs(
    piece, split, left, left_stride, row_scales, pairs, pairs_stride, blocks, parts, rows, width, share,
    SCALED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`_share` of an e4m3 payload, of which two values are read as one 16-bit word (`pairs_stride` counts words).

    The tensor cores' loads transpose 16-bit values and no bytes, and a cast from e4m3 takes several instructions where
    a shift takes one."""
    block = blocks + piece // PIECES * 4
    start = tl.multiple_of(tl.load(block) + piece % PIECES * WIDTH, 16)
    end_column = tl.multiple_of(tl.load(block + 1), 16)
    column, rank = tl.load(block + 2), tl.load(block + 3)
    pair = tl.arange(0, WIDTH // 2)[None, :]
    # not 2 * pair < ...: then the compiler does not see that neighbours are alike, and loads one by one
    inside = pair < tl.multiple_of((end_column - start) // 2, 8)
    begin = tl.multiple_of(split * share, 16)
    end = tl.minimum(begin + share, rows)
    even = tl.zeros((RANK, WIDTH // 2), tl.float32)
    odd = tl.zeros((RANK, WIDTH // 2), tl.float32)
    j = tl.arange(0, RANK)[:, None]
    k = tl.arange(0, STEP)
    of = left + (column + j).to(tl.int64) * left_stride + (begin + k[None, :])
    at = pairs + (begin + k[:, None]).to(tl.int64) * pairs_stride + (tl.multiple_of(start // 2, 8) + pair)
    for first in range(begin, end, STEP):
        p = _load_left(of, row_scales, j, rank, first + k, end, SCALED)
        low, high = _bf16_of_pairs(tl.load(at, mask=(first + k[:, None] < end) & inside, other=0))
        even = tl.dot(p, low.to(DOT), even)
        odd = tl.dot(p, high.to(DOT), odd)
        of += STEP
        at += STEP * pairs_stride
    w = start + tl.arange(0, WIDTH)[None, :]
    to = parts + (split * RANK + j).to(tl.int64) * width + w
    tl.store(to, tl.interleave(even, odd) * _UNLIFT, mask=(j < rank) & (w < end_column))


@triton.jit
def _shares(
    left, left_stride, row_scales, payload, payload_stride, blocks, parts, rows, width, share, pieces, programs,
    left_2, left_stride_2, row_scales_2, payload_2, payload_stride_2, blocks_2, parts_2, rows_2, width_2, share_2,
    pieces_2,
    SCALED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr,
    SCALED_2: tl.constexpr, RANK_2: tl.constexpr, WIDTH_2: tl.constexpr, PIECES_2: tl.constexpr,
    STEP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Two sides: the first `programs` programs take one, the others the other."""
    program = tl.program_id(0)
    if program < programs:
        if PAIRS:
            _share_of_pairs(
                program % pieces, program // pieces, left, left_stride, row_scales, payload, payload_stride, blocks,
                parts, rows, width, share, SCALED, RANK, WIDTH, PIECES, STEP,
            )  # fmt: skip
        else:
            _share(
                program % pieces, program // pieces, left, left_stride, row_scales, payload, payload_stride, blocks,
                parts, rows, width, share, SCALED, RANK, WIDTH, PIECES, STEP,
            )  # fmt: skip
    else:
        other = program - programs
        if PAIRS:
            _share_of_pairs(
                other % pieces_2, other // pieces_2, left_2, left_stride_2, row_scales_2, payload_2, payload_stride_2,
                blocks_2, parts_2, rows_2, width_2, share_2, SCALED_2, RANK_2, WIDTH_2, PIECES_2, STEP,
            )  # fmt: skip
        else:
            _share(
                other % pieces_2, other // pieces_2, left_2, left_stride_2, row_scales_2, payload_2, payload_stride_2,
                blocks_2, parts_2, rows_2, width_2, share_2, SCALED_2, RANK_2, WIDTH_2, PIECES_2, STEP,
            )  # fmt: skip


@triton.jit
def _sum(
    piece, parts, splits, divisors, blocks, out, out_row, out_column, width,
    DIVIDED: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[j, w] (by its strides) = the sum of the parts, over the divisor of w."""
    block = blocks + piece // (BLOCK // WIDTH) * 4
    end_column = tl.multiple_of(tl.load(block + 1), 16)
    rank = tl.load(block + 3)
    w = tl.multiple_of(tl.load(block), 16) + piece % (BLOCK // WIDTH) * WIDTH + tl.arange(0, WIDTH)
    j = tl.arange(0, RANK)
    live = (j[:, None] < rank) & (w[None, :] < end_column)
    total = tl.zeros((RANK, WIDTH), tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * RANK + j[:, None]).to(tl.int64) * width + w[None, :], mask=live, other=0.0)
    if DIVIDED:
        total /= tl.load(divisors + w, mask=w < end_column, other=1.0)[None, :]
    tl.store(out + j[:, None] * out_row + w[None, :] * out_column, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def _sums(
    parts, splits, divisors, blocks, out, out_row, out_column, width, programs,
    parts_2, splits_2, divisors_2, blocks_2, out_2, out_row_2, out_column_2, width_2,
    DIVIDED: tl.constexpr, RANK: tl.constexpr, DIVIDED_2: tl.constexpr, RANK_2: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        _sum(program, parts, splits, divisors, blocks, out, out_row, out_column, width, DIVIDED, RANK, WIDTH, BLOCK)
    else:
        _sum(
            program - programs, parts_2, splits_2, divisors_2, blocks_2, out_2, out_row_2, out_column_2, width_2,
            DIVIDED_2, RANK_2, WIDTH, BLOCK,
        )  # fmt: skip


class _Plan(NamedTuple):
    """How a side is divided among programs."""

    side: Side
    parts: Tensor
    columns: int
    pieces: int
    """Of a block."""
    share: int

    @property
    def scales(self) -> Tensor | None:
        """That the left side lacks."""
        return None if self.side.left.lifted else self.side.row_scales

    @property
    def all_pieces(self) -> int:
        """Pieces of all blocks."""
        return self.side.blocks.shape[0] * self.pieces

    @property
    def work(self) -> int:
        """Of one program."""
        return self.share * self.columns * self.parts.shape[1]

    def share_arguments(self) -> tuple[Any, ...]:
        side, payload = self.side, self.side.payload
        read = payload.view(torch.uint16) if payload.dtype == torch.float8_e4m3fn else payload
        return (
            side.left.rows, side.left.rows.stride(0), self.scales, read, read.stride(0), side.blocks, self.parts,
            payload.shape[0], side.out.shape[1], self.share, self.all_pieces,
        )  # fmt: skip

    def share_constants(self) -> tuple[bool, int, int, int]:
        return self.scales is not None, self.parts.shape[1], self.columns, self.pieces

    def sum_arguments(self) -> tuple[Any, ...]:
        side, out = self.side, self.side.out
        return (
            self.parts, self.parts.shape[0], side.divisors, side.blocks, out, out.stride(0), out.stride(1),
            out.shape[1],
        )  # fmt: skip


def _plan(side: Side, programs: int = _PROGRAMS) -> _Plan:
    """`programs`: about as many as there may be."""
    rows, padded = side.payload.shape[0], at_least_16(side.rank)
    # fewer columns where the sums would not fit into the registers
    widest = BLOCK if side.payload.dtype == torch.float8_e4m3fn else _WIDTH
    columns = max(32, min(widest, _SUMS // padded))
    pieces = BLOCK // columns
    splits = max(1, min(_SPLITS, programs // max(1, side.blocks.shape[0] * pieces), rows // 256))
    share = ceil_div(ceil_div(rows, splits), _STEP) * _STEP
    parts = torch.empty(splits, padded, side.out.shape[1], dtype=torch.float32, device=side.out.device)
    return _Plan(side, parts, columns, pieces, share)


def _stages(plans: Sequence[_Plan]) -> int:
    """As many as fit into shared memory, where the two sides may lie one after the other."""
    _, shared_memory = processors(plans[0].side.payload.device)
    stage = sum(
        _STEP
        * (plan.parts.shape[1] * plan.side.left.rows.element_size() + plan.columns * plan.side.payload.element_size())
        for plan in plans
    )
    return max(2, min(_STAGES, shared_memory // stage))


def gradients(first: Side, second: Side) -> None:
    for start in range(0, max(first.rank, second.rank), _RANKS):
        _gradients(_part(first, start), _part(second, start))


def _part(side: Side, start: int) -> Side:
    """Of its ranks those from `start` on that are formed at once."""
    if side.rank <= _RANKS:
        return side if start == 0 else side._replace(blocks=side.blocks[:0], rank=1)
    table = side.blocks.clone()
    table[:, 2] += start
    table[:, 3] = (table[:, 3] - start).clamp(0, _RANKS)
    return side._replace(blocks=table, rank=min(_RANKS, max(1, side.rank - start)), out=side.out[start:])


def _plans(first: Side, second: Side) -> list[_Plan]:
    """The second side's programs find room beside the first's where that has so many ranks that no more than two fit on
    a processor (q, k and v of an 8B model, 8,192 rows on an H200: 48 instead of 53 us). But not in fewer than four
    splits: the longer a sum on the tensor cores, the less exact."""
    one, two = _plan(first), _plan(second)
    if one.parts.shape[1] <= 32:
        return [one, two]
    beside = _plan(second, _PROGRAMS - one.all_pieces * one.parts.shape[0])
    return [one, beside if beside.parts.shape[0] >= 4 else two]


def _gradients(first: Side, second: Side) -> None:
    # those that take longest begin first (gate and up of an 8B model, 8,192 rows on an H200: 87 instead of 102 us)
    a, b = plans = sorted(_plans(first, second), key=lambda plan: plan.work, reverse=True)
    programs = [plan.all_pieces * plan.parts.shape[0] for plan in plans]
    (scaled, rank, width, pieces), (scaled_2, rank_2, width_2, pieces_2) = (p.share_constants() for p in plans)
    launch(
        _shares, (sum(programs),), *a.share_arguments(), programs[0], *b.share_arguments(),
        SCALED=scaled, RANK=rank, WIDTH=width, PIECES=pieces,
        SCALED_2=scaled_2, RANK_2=rank_2, WIDTH_2=width_2, PIECES_2=pieces_2,
        STEP=_STEP, PAIRS=first.payload.dtype == torch.float8_e4m3fn,
        num_warps=4, num_stages=_stages(plans),
    )  # fmt: skip
    programs = [plan.side.blocks.shape[0] * (BLOCK // _GATHER_WIDTH) for plan in plans]
    launch(
        _sums, (sum(programs),), *a.sum_arguments(), programs[0], *b.sum_arguments(),
        DIVIDED=a.side.divisors is not None, RANK=rank, DIVIDED_2=b.side.divisors is not None, RANK_2=rank_2,
        WIDTH=_GATHER_WIDTH, BLOCK=BLOCK,
    )  # fmt: skip
