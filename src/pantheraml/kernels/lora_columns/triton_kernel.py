"""Small, memory-bound kernels: every one reads its wide operand once. One launch serves all layers that share it.

Where a kernel looks up where to begin and end, it is told that these are multiples of 16 (as they are: see `DIVISOR` in
op.py). Without that every byte is loaded by itself, and the kernel takes twice as long. Not so where adapters are
written: told the same, Triton 3.6 stores other values than it computed (B transposed, on an H200).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.lora_columns import reference
from pantheraml.kernels.lora_columns.spans import PROJECT_ROWS
from pantheraml.kernels.triton_support import INTERPRETED, LARGEST, block_of, ceil_div, launch, processors, to_e4m3

_LIFT = tl.constexpr(reference.LIFT)
_WRITE_VALUES, _WRITE_WARPS = 8192, 4
"""Of A or B for a program that writes them."""
_TILE = 16384
"""Values of a tile at most: more do not fit into the registers."""
_PROJECT_BYTES, _PROJECT_RANKS, _PROJECT_STAGES = 256, 128, 5
_PLACE_ROWS, _PLACE_CHUNK = 32, 512


@triton.jit
def _pointer(entry, KIND: tl.constexpr):
    return tl.load(entry).to(tl.pointer_type(KIND))


@triton.jit
def _load_down(pointers, j, k, rank, width, PARAMETER: tl.constexpr):
    live = (j[:, None] < rank) & (k[None, :] < width)
    down = _pointer(pointers, PARAMETER)
    return tl.load(down + j[:, None] * width + k[None, :], mask=live, other=0.0).to(tl.float32)


@triton.jit
def _load_up(pointers, n, j, rank, height, scaling, PARAMETER: tl.constexpr, QUANTISED: tl.constexpr):
    """In units of the scales, if there are any."""
    live = (n[:, None] < height) & (j[None, :] < rank)
    up = _pointer(pointers + 1, PARAMETER)
    values = tl.load(up + n[:, None] * rank + j[None, :], mask=live, other=0.0).to(tl.float32)
    if not QUANTISED:
        return values * scaling
    scales = _pointer(pointers + 2, tl.float32)
    return values * (scaling / tl.load(scales + n, mask=n < height, other=1.0))[:, None]


@triton.jit
def _largest(
    pointers, numbers, scalings, work, bits,
    PARAMETER: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each row of A and each column of scaled B, as the bits of non-negative floats,
    of which NaN's are the largest."""
    work += tl.program_id(0) * 2
    adapter, tile = tl.load(work), tl.load(work + 1)
    pointers += adapter * 9
    numbers += adapter * 7
    width, height, rank = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 4)
    bits += adapter * 2 * RANK
    j = tl.arange(0, RANK)
    down_tiles = tl.cdiv(width, TILE)
    if tile < down_tiles:
        k = tile * TILE + tl.arange(0, TILE)
        found = tl.abs(_load_down(pointers, j, k, rank, width, PARAMETER)).to(tl.int32, bitcast=True)
        tl.atomic_max(bits + RANK + j, tl.max(found, 1), mask=j < rank, sem="relaxed")
    else:
        n = (tile - down_tiles) * TILE + tl.arange(0, TILE)
        found_up = tl.abs(_load_up(pointers, n, j, rank, height, tl.load(scalings + adapter), PARAMETER, True))
        tl.atomic_max(bits + j, tl.max(found_up.to(tl.int32, bitcast=True), 0), mask=j < rank, sem="relaxed")


@triton.jit
def _unit(bits, j, rank):
    """What brings the largest magnitude to the end of e4m3's range."""
    found = tl.load(bits + j, mask=j < rank, other=0).to(tl.float32, bitcast=True)
    return tl.where(found < 1e-30, 1e-30, found) / LARGEST


@triton.jit
def _write(
    pointers, numbers, scalings, work, bits,
    PARAMETER: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, ELEMENT: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """From the end of the work: what `_largest` read last may still be in the cache."""
    work += (tl.num_programs(0) - 1 - tl.program_id(0)) * 2
    adapter, tile = tl.load(work), tl.load(work + 1)
    pointers += adapter * 9
    numbers += adapter * 7
    width, height, rank = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 4)
    bits += adapter * 2 * RANK
    j = tl.arange(0, RANK)
    down_tiles = tl.cdiv(width, TILE)
    if tile < down_tiles:
        k = tile * TILE + tl.arange(0, TILE)
        a = _load_down(pointers, j, k, rank, width, PARAMETER)
        a_live = (j[:, None] < rank) & (k[None, :] < width)
        if QUANTISED:
            a_unit = _unit(bits + RANK, j, rank)
            tl.store(_pointer(pointers + 7, tl.float32) + j, a_unit, mask=(j < rank) & (tile == 0))
            a_out = to_e4m3(a * (1.0 / a_unit)[:, None])
        else:
            a_out = a.to(ELEMENT)
        matrix_down = _pointer(pointers + 3, ELEMENT)
        tl.store(matrix_down + j[:, None].to(tl.int64) * tl.load(numbers + 2) + k[None, :], a_out, mask=a_live)
        if tl.load(pointers + 6) != 0:
            turned = _pointer(pointers + 6, ELEMENT) + k[None, :].to(tl.int64) * tl.load(numbers + 6)
            tl.store(turned + j[:, None], a_out, mask=a_live)
    else:
        n = (tile - down_tiles) * TILE + tl.arange(0, TILE)
        b = _load_up(pointers, n, j, rank, height, tl.load(scalings + adapter), PARAMETER, QUANTISED)
        b_live = (n[:, None] < height) & (j[None, :] < rank)
        if QUANTISED:
            b_unit = _unit(bits, j, rank)
            tl.store(_pointer(pointers + 8, tl.float32) + j, b_unit, mask=(j < rank) & (tile == down_tiles))
            b_out = to_e4m3(b * (1.0 / b_unit)[None, :])
        else:
            b_out = b.to(ELEMENT)
        matrix_up = _pointer(pointers + 5, ELEMENT) + n[:, None].to(tl.int64) * tl.load(numbers + 5)
        tl.store(matrix_up + j[None, :], b_out, mask=b_live)
        factor_up = _pointer(pointers + 4, ELEMENT) + j[None, :].to(tl.int64) * tl.load(numbers + 3)
        tl.store(factor_up + n[:, None], b_out, mask=b_live)


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


class Tables(NamedTuple):
    """Adapters as the kernels that write them read them."""

    pointers: Tensor
    """[adapters, 9]: A, B, scales, matrix_down, factor_up, matrix_up, turned_down, unit_down, unit_up; 0: none."""
    numbers: Tensor
    """[adapters, 7]: width, height, strides of matrix_down and factor_up; rank, strides of matrix_up, turned_down."""
    scalings: Tensor
    work: Tensor
    """[programs, 2]: an adapter, and which of its tiles; those of A come first."""
    constants: dict[str, int]


def tables(
    pointers: Sequence[Sequence[int]],
    numbers: Sequence[Sequence[int]],
    scalings: Sequence[float],
    device: torch.device,
) -> Tables:
    rank = block_of(max(row[4] for row in numbers))
    tile = max(16, _WRITE_VALUES // rank)
    counts = torch.tensor([ceil_div(width, tile) + ceil_div(height, tile) for width, height, *_ in numbers])
    adapter = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(adapter)) - (counts.cumsum(0) - counts)[adapter]
    addresses, extents = torch.tensor(pointers), torch.tensor(numbers)
    return Tables(
        addresses.to(device),
        extents.to(device, torch.int32),
        torch.tensor(scalings, dtype=torch.float32).to(device),
        torch.stack([adapter, within], dim=1).to(device, torch.int32),
        {"RANK": rank, "TILE": tile},
    )


def write(given: Tables, parameter: torch.dtype, element: torch.dtype) -> None:
    pointers, numbers, scalings, work, shape = given
    grid, quantised = (work.shape[0],), element == torch.float8_e4m3fn
    bits = torch.zeros(pointers.shape[0], 2, shape["RANK"], dtype=torch.int32, device=pointers.device)
    arguments = pointers, numbers, scalings, work, bits
    constants = {"PARAMETER": _ELEMENTS[parameter], **shape}
    if quantised:
        launch(_largest, grid, *arguments, **constants, num_warps=_WRITE_WARPS)
    constants |= {"ELEMENT": _ELEMENTS[element], "QUANTISED": quantised}
    launch(_write, grid, *arguments, **constants, num_warps=_WRITE_WARPS)


def _at_once(most: int, rank: int) -> int:
    """Rows, where each has so many ranks."""
    return max(16, min(most, _TILE // block_of(rank)))


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
