"""Small, memory-bound kernels: every one reads its wide operand once. One launch serves all layers that share it.

Where a kernel looks up where to begin and end, it is told that these are multiples of 16 (as they are: see `DIVISOR` in
op.py). Without that every byte is loaded by itself, and the kernel takes twice as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.lora_columns import reference
from pantheraml.kernels.lora_columns.spans import PROJECT_ROWS
from pantheraml.kernels.triton_support import INTERPRETED, LARGEST, block_of, ceil_div, launch, processors, to_e4m3

_LIFT = tl.constexpr(reference.LIFT)
_DOWN_TILE, _UP_TILE = 1024, 64  # columns of A and rows of B for one program, at most
_TILE = 16384
"""Values of a tile at most: more do not fit into the registers."""
_PROJECT_BYTES, _PROJECT_RANKS, _PROJECT_STAGES = 256, 128, 5
_PLACE_ROWS, _PLACE_CHUNK = 32, 512


@triton.jit
def _load_down(down, j, k, rank, width):
    live = (j[:, None] < rank) & (k[None, :] < width)
    return tl.load(down + j[:, None] * width + k[None, :], mask=live, other=0.0).to(tl.float32)


@triton.jit
def _load_up(up, scales, n, j, rank, height, scaling, QUANTISED: tl.constexpr):
    live = (n[:, None] < height) & (j[None, :] < rank)
    values = tl.load(up + n[:, None] * rank + j[None, :], mask=live, other=0.0).to(tl.float32) * scaling
    if QUANTISED:
        values /= tl.load(scales + n, mask=n < height, other=1.0)[:, None]
    return values


@triton.jit
def _largest(
    pointers, numbers, scalings, bits,
    PARAMETER: tl.constexpr, RANK: tl.constexpr, DOWN: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each row of A and each column of scaled B, as the bits of non-negative floats,
    of which NaN's are the largest."""
    adapter = tl.program_id(0)
    tile = tl.program_id(1)
    numbers += adapter * 6
    rank, width, height = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    bits += adapter * 2 * RANK
    j = tl.arange(0, RANK)
    down_tiles = tl.cdiv(width, DOWN)
    if tile < down_tiles:
        down = tl.load(pointers + adapter * 8).to(tl.pointer_type(PARAMETER))
        k = tile * DOWN + tl.arange(0, DOWN)
        found = tl.abs(_load_down(down, j, k, rank, width)).to(tl.int32, bitcast=True)
        tl.atomic_max(bits + RANK + j, tl.max(found, 1), mask=j < rank)
    elif (tile - down_tiles) * UP < height:
        up = tl.load(pointers + adapter * 8 + 1).to(tl.pointer_type(PARAMETER))
        scales = tl.load(pointers + adapter * 8 + 2).to(tl.pointer_type(tl.float32))
        n = (tile - down_tiles) * UP + tl.arange(0, UP)
        found_up = tl.abs(_load_up(up, scales, n, j, rank, height, tl.load(scalings + adapter), True))
        tl.atomic_max(bits + j, tl.max(found_up.to(tl.int32, bitcast=True), 0), mask=j < rank)


@triton.jit
def _write(
    pointers, numbers, scalings, bits,
    PARAMETER: tl.constexpr, ELEMENT: tl.constexpr, RANK: tl.constexpr, DOWN: tl.constexpr, UP: tl.constexpr,
    QUANTISED: tl.constexpr,
):  # fmt: skip
    adapter = tl.program_id(0)
    tile = tl.program_id(1)
    numbers += adapter * 6
    rank, width, height = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    bits += adapter * 2 * RANK
    pointers += adapter * 8
    j = tl.arange(0, RANK)
    down_tiles = tl.cdiv(width, DOWN)
    if tile < down_tiles:
        down = tl.load(pointers).to(tl.pointer_type(PARAMETER))
        k = tile * DOWN + tl.arange(0, DOWN)
        a = _load_down(down, j, k, rank, width)
        matrix_down = tl.load(pointers + 4).to(tl.pointer_type(ELEMENT))
        to_down = matrix_down + j[:, None].to(tl.int64) * tl.load(numbers + 4) + k[None, :]
        a_live = (j[:, None] < rank) & (k[None, :] < width)
        if QUANTISED:
            a_found = tl.load(bits + RANK + j, mask=j < rank, other=0).to(tl.float32, bitcast=True)
            a_unit = tl.where(a_found < 1e-30, 1e-30, a_found) / LARGEST
            unit_down = tl.load(pointers + 6).to(tl.pointer_type(tl.float32))
            tl.store(unit_down + j, a_unit, mask=(j < rank) & (tile == 0))
            tl.store(to_down, to_e4m3(a * (1.0 / a_unit)[:, None]), mask=a_live)
        else:
            tl.store(to_down, a.to(ELEMENT), mask=a_live)
    elif (tile - down_tiles) * UP < height:
        up = tl.load(pointers + 1).to(tl.pointer_type(PARAMETER))
        scales = tl.load(pointers + 2).to(tl.pointer_type(tl.float32))
        n = (tile - down_tiles) * UP + tl.arange(0, UP)
        b = _load_up(up, scales, n, j, rank, height, tl.load(scalings + adapter), QUANTISED)
        matrix_up = tl.load(pointers + 3).to(tl.pointer_type(ELEMENT))
        factor_up = tl.load(pointers + 5).to(tl.pointer_type(ELEMENT))
        to_up = matrix_up + n[:, None].to(tl.int64) * tl.load(numbers + 3) + j[None, :]
        to_factor = factor_up + j[None, :].to(tl.int64) * tl.load(numbers + 5) + n[:, None]
        b_live = (n[:, None] < height) & (j[None, :] < rank)
        if QUANTISED:
            b_found = tl.load(bits + j, mask=j < rank, other=0).to(tl.float32, bitcast=True)
            b_unit = tl.where(b_found < 1e-30, 1e-30, b_found) / LARGEST
            unit_up = tl.load(pointers + 7).to(tl.pointer_type(tl.float32))
            tl.store(unit_up + j, b_unit, mask=(j < rank) & (tile == down_tiles))
            quantised = to_e4m3(b * (1.0 / b_unit)[None, :])
            tl.store(to_up, quantised, mask=b_live)
            tl.store(to_factor, quantised, mask=b_live)
        else:
            tl.store(to_up, b.to(ELEMENT), mask=b_live)
            tl.store(to_factor, b.to(ELEMENT), mask=b_live)


@triton.jit
def _project(
    payload, payload_stride, factor, factor_stride, segments, out, rows, ranks, splits,
    RANK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """For segment (start, width, column, rank): out[split, :, column:] = payload @ factor transposed, over the split's
    share of the segment's width. BLOCKS programs take RANK rows of the factor each."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    segment = segments + tl.program_id(2) // BLOCKS * 4
    start = tl.multiple_of(tl.load(segment), 16)
    width = tl.multiple_of(tl.load(segment + 1), 16)
    column, rank = tl.load(segment + 2), tl.load(segment + 3)
    j = tl.program_id(2) % BLOCKS * RANK + tl.arange(0, RANK)
    share = tl.cdiv(tl.cdiv(width, splits), STEP) * STEP
    begin = split * share
    end = tl.minimum(begin + share, width)
    total = tl.zeros((ROWS, RANK), tl.float32)
    at = payload + m[:, None].to(tl.int64) * payload_stride + start
    of = factor + j[:, None].to(tl.int64) * factor_stride + start
    for first in range(begin, end, STEP):
        k = first + tl.arange(0, STEP)
        x = tl.load(at + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < end), other=0.0)
        f = tl.load(of + k[None, :], mask=(j[:, None] < rank) & (k[None, :] < end), other=0.0)
        if INTERPRETED:
            total = tl.dot(x.to(tl.float32), tl.trans(f.to(tl.float32)), total)
        else:
            total = tl.dot(x, tl.trans(f), total)
    to = out + (split * rows + m[:, None]).to(tl.int64) * ranks + column + j[None, :]
    tl.store(to, total, mask=(m[:, None] < rows) & (j[None, :] < rank))


@triton.jit
def _place_left(left, left_stride, values, m, row_scales, ranks, rows, LIFTED: tl.constexpr):
    """Values [m, ranks], times their rows' scales and the lift, turned over."""
    if LIFTED:
        values *= (tl.load(row_scales + m, mask=m < rows, other=0.0) * _LIFT)[:, None]
    j = tl.arange(0, values.shape[1])[:, None]
    to = left + j.to(tl.int64) * left_stride + m[None, :]
    tl.store(to, tl.trans(values).to(left.dtype.element_ty), mask=(j < ranks) & (m[None, :] < rows))


@triton.jit
def _write_columns(
    total, m, ranks, own_units, other_units, payload, payload_stride, scales, middle, rows, width, room,
    factor, input_scales, down, up, left_stride,
    QUANTISED: tl.constexpr, BACK: tl.constexpr, LIFTED: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the columns behind the payload's rows `m` from these sums. On the way forward the sums in real units
    become `middle`; on the way back they, times `factor`, and `middle` become the left sides `down` and `up`."""
    j = tl.arange(0, RANKS)
    live = (m[:, None] < rows) & (j[None, :] < ranks)
    at = payload + m[:, None].to(tl.int64) * payload_stride
    to_middle = middle + m[:, None] * ranks + j[None, :]
    there = (m[:, None] < rows) & (j[None, :] < room)
    if QUANTISED:
        scale = tl.load(scales + m, mask=m < rows, other=1.0)
        total *= tl.load(own_units + j, mask=j < ranks, other=0.0)[None, :]
        if BACK:
            _place_left(down, left_stride, total * (scale * factor)[:, None], m, input_scales, ranks, rows, LIFTED)
        else:
            tl.store(to_middle, (total * scale[:, None]).to(middle.dtype.element_ty), mask=live)
        values = total * tl.load(other_units + j, mask=j < ranks, other=0.0)[None, :]
        # Where a column is beyond e4m3, the whole row moves to a scale at which it is not: a power of two, so that
        # what was quantised already only changes its exponent.
        excess = tl.max(tl.abs(values), 1) / LARGEST
        move = tl.where(excess > 1.0, tl.exp2(tl.ceil(tl.log2(tl.maximum(excess, 1e-30)))), 1.0)
        if tl.max(move, 0) > 1.0:
            for start in range(0, width, CHUNK):
                k = start + tl.arange(0, CHUNK)
                moved = (m[:, None] < rows) & (k[None, :] < width) & (move[:, None] > 1.0)
                old = tl.load(at + k[None, :], mask=moved, other=0.0).to(tl.float32)
                tl.store(at + k[None, :], to_e4m3(old / move[:, None]), mask=moved)
            tl.store(scales + m, scale * move, mask=m < rows)
        if BACK:
            there_before = tl.load(to_middle, mask=live, other=0.0).to(tl.float32) * (scale * move * _LIFT)[:, None]
            _place_left(up, left_stride, there_before, m, input_scales, ranks, rows, False)
        tl.store(at + width + j[None, :], to_e4m3(values / move[:, None]), mask=there)
    else:
        if BACK:
            _place_left(down, left_stride, total * factor, m, input_scales, ranks, rows, False)
            there_before = tl.load(to_middle, mask=live, other=0.0).to(tl.float32)
            _place_left(up, left_stride, there_before, m, input_scales, ranks, rows, False)
        else:
            tl.store(to_middle, total.to(middle.dtype.element_ty), mask=live)
        tl.store(at + width + j[None, :], total.to(payload.dtype.element_ty), mask=there)
    zeros = tl.zeros_like(total)
    for start in range(RANKS, room, RANKS):
        rest = (m[:, None] < rows) & (start + j[None, :] < room)
        tl.store(at + width + start + j[None, :], zeros.to(payload.dtype.element_ty), mask=rest)


@triton.jit
def _place(
    raw, splits, ranks, own_units, other_units, payload, payload_stride, scales, middle, rows, width, room,
    factor, input_scales, down, up, left_stride,
    QUANTISED: tl.constexpr, BACK: tl.constexpr, LIFTED: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums the splits, and writes the columns."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANKS)
    live = (m[:, None] < rows) & (j[None, :] < ranks)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for split in range(splits):
        total += tl.load(raw + (split * rows + m[:, None]).to(tl.int64) * ranks + j[None, :], mask=live, other=0.0)
    _write_columns(
        total, m, ranks, own_units, other_units, payload, payload_stride, scales, middle, rows, width, room,
        factor, input_scales, down, up, left_stride, QUANTISED, BACK, LIFTED, RANKS, CHUNK,
    )  # fmt: skip


@triton.jit
def _project_and_place(
    projecting, projecting_stride, segments, count,
    ranks, own_units, other_units, payload, payload_stride, scales, middle, rows, width, room,
    factor, input_scales, down, up, left_stride,
    QUANTISED: tl.constexpr, BACK: tl.constexpr, LIFTED: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`_project` of whole rows, whose sums are at hand when the columns are written."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANKS)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for number in range(count):
        start = tl.multiple_of(tl.load(segments + number * 4), 16)
        extent = tl.multiple_of(tl.load(segments + number * 4 + 1), 16)
        own = j - tl.load(segments + number * 4 + 2)  # the rank within its adapter
        mine = (own >= 0) & (own < tl.load(segments + number * 4 + 3))
        at = payload + m[:, None].to(tl.int64) * payload_stride + start
        of = projecting + own[:, None].to(tl.int64) * projecting_stride + start
        for first in range(0, extent, STEP):
            k = first + tl.arange(0, STEP)
            x = tl.load(at + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < extent), other=0.0)
            f = tl.load(of + k[None, :], mask=mine[:, None] & (k[None, :] < extent), other=0.0)
            if INTERPRETED:
                total = tl.dot(x.to(tl.float32), tl.trans(f.to(tl.float32)), total)
            else:
                total = tl.dot(x, tl.trans(f), total)
    _write_columns(
        total, m, ranks, own_units, other_units, payload, payload_stride, scales, middle, rows, width, room,
        factor, input_scales, down, up, left_stride, QUANTISED, BACK, LIFTED, RANKS, CHUNK,
    )  # fmt: skip


def at_least_16(rank: int) -> int:
    """A power of two, and what the tensor cores take at least."""
    return max(16, block_of(rank))


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv}


def write(
    pointers: Tensor, numbers: Tensor, scalings: Tensor, rank: int, tiles: int, parameter: torch.dtype,
    element: torch.dtype,
) -> None:  # fmt: skip
    count, quantised = pointers.shape[0], element == torch.float8_e4m3fn
    bits = torch.zeros(count, 2, block_of(rank), dtype=torch.int32, device=pointers.device)
    shape = {"RANK": block_of(rank), "DOWN": _at_once(_DOWN_TILE, rank), "UP": _at_once(_UP_TILE, rank)}
    kinds = {"PARAMETER": _ELEMENTS[parameter]}
    if quantised:
        launch(_largest, (count, tiles), pointers, numbers, scalings, bits, **kinds, **shape)
    kinds["ELEMENT"] = _ELEMENTS[element]
    launch(_write, (count, tiles), pointers, numbers, scalings, bits, **kinds, **shape, QUANTISED=quantised)


def _at_once(most: int, rank: int) -> int:
    """Rows or columns, where each has so many ranks."""
    return max(16, min(most, _TILE // block_of(rank)))


def tiles(width: int, height: int, rank: int) -> int:
    """Programs that `write` needs for one adapter, where the largest rank is `rank`."""
    return ceil_div(width, _at_once(_DOWN_TILE, rank)) + ceil_div(height, _at_once(_UP_TILE, rank))


def project(payload: Tensor, factor: Tensor, segments: Tensor, rank: int, out: Tensor) -> None:
    splits, rows, ranks = out.shape
    at_once = min(_PROJECT_RANKS, at_least_16(rank))
    blocks = ceil_div(rank, at_once)
    launch(
        _project, (ceil_div(rows, PROJECT_ROWS), splits, segments.shape[0] * blocks),
        payload, payload.stride(0), factor, factor.stride(0), segments, out, rows, ranks, splits,
        RANK=at_once, BLOCKS=blocks, ROWS=PROJECT_ROWS, STEP=_PROJECT_BYTES // payload.element_size(),
        num_warps=4, num_stages=_project_stages(payload, at_once),
    )  # fmt: skip


def _project_stages(payload: Tensor, at_once: int) -> int:
    _, shared_memory = processors(payload.device)
    return max(2, min(_PROJECT_STAGES, shared_memory // ((PROJECT_ROWS + at_once) * _PROJECT_BYTES)))


class Back(NamedTuple):
    """What the way back has besides."""

    factor: float
    input_scales: Tensor | None
    down: Tensor
    up: Tensor


class Target(NamedTuple):
    """Where columns are written, and by which measures."""

    own_units: Tensor
    other_units: Tensor
    payload: Tensor
    width: int
    scales: Tensor | None
    middle: Tensor
    back: Back | None

    def arguments(self) -> tuple[Any, ...]:
        """From `own_units` on, as the kernels name them."""
        payload, back = self.payload, self.back
        sides: tuple[Any, ...] = (1.0, None, None, None, 0) if back is None else (*back, back.down.stride(0))
        return (
            self.own_units, self.other_units, payload, payload.stride(0), self.scales, self.middle, payload.shape[0],
            self.width, payload.shape[1] - self.width, *sides,
        )  # fmt: skip

    def constants(self) -> dict[str, bool]:
        lifted = self.back is not None and self.back.input_scales is not None
        return {"QUANTISED": self.scales is not None, "BACK": self.back is not None, "LIFTED": lifted}


def place(raw: Tensor, target: Target) -> None:
    splits, rows, ranks = raw.shape
    padded = at_least_16(ranks)
    at_once = _at_once(_PLACE_ROWS, padded)
    launch(
        _place, (ceil_div(rows, at_once),), raw, splits, ranks, *target.arguments(),
        **target.constants(), RANKS=padded, ROWS=at_once, CHUNK=_PLACE_CHUNK,
    )  # fmt: skip


def projects_and_places(ranks: int) -> bool:
    """Whether `project_and_place` can: all columns of a row at once."""
    return at_least_16(ranks) <= _PROJECT_RANKS


def project_and_place(factor: Tensor, segments: Tensor, ranks: int, target: Target) -> None:
    payload, padded = target.payload, at_least_16(ranks)
    launch(
        _project_and_place, (ceil_div(payload.shape[0], PROJECT_ROWS),),
        factor, factor.stride(0), segments, segments.shape[0], ranks, *target.arguments(),
        **target.constants(), RANKS=padded, ROWS=PROJECT_ROWS, STEP=_PROJECT_BYTES // payload.element_size(),
        CHUNK=_PLACE_CHUNK, num_warps=4, num_stages=_project_stages(payload, padded),
    )  # fmt: skip
