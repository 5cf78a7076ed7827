"""Memory-bound kernels for LoRA columns. Each reads its wide operand once, in one launch for all layers that share it.

Offsets and sizes loaded from tables get a `tl.multiple_of(..., 16)` hint, which always holds (see `DIVISOR` in op.py).
Without it, loads are one byte wide and the kernel takes twice as long. The kernel that writes adapters must not use
the hint: Triton 3.6 then stores wrong values (B transposed, on an H200).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.lora_columns import reference
from pantheraml.kernels.lora_columns.adapter_layout import PROJECT_ROWS
from pantheraml.kernels.triton_support import E4M3_MAX, INTERPRETED, block_of, ceil_div, launch, sm_limits, to_e4m3

_PRESCALE = tl.constexpr(reference.PRESCALE)
_WRITE_VALUES, _WRITE_WARPS = 8192, 4
"""Values of A or B per program of `_write`."""
_TILE = 16384
"""Maximum values per tile: more do not fit in registers."""
_PROJECT_BYTES, _PROJECT_RANKS, _PROJECT_STAGES = 256, 128, 5
_PLACE_ROWS, _PLACE_CHUNK = 32, 512


@triton.jit
def _pointer(entry, KIND: tl.constexpr):
    return tl.load(entry).to(tl.pointer_type(KIND))


@triton.jit
def _load_down(pointers, j, k, rank, width, PARAMETER: tl.constexpr):
    mask = (j[:, None] < rank) & (k[None, :] < width)
    down = _pointer(pointers, PARAMETER)
    return tl.load(down + j[:, None] * width + k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_up(pointers, n, j, rank, height, scaling, PARAMETER: tl.constexpr, QUANTIZED: tl.constexpr):
    """Load scaled B, divided by W's row scales if QUANTIZED."""
    mask = (n[:, None] < height) & (j[None, :] < rank)
    up = _pointer(pointers + 1, PARAMETER)
    values = tl.load(up + n[:, None] * rank + j[None, :], mask=mask, other=0.0).to(tl.float32)
    if not QUANTIZED:
        return values * scaling
    scales = _pointer(pointers + 2, tl.float32)
    return values * (scaling / tl.load(scales + n, mask=n < height, other=1.0))[:, None]


@triton.jit
def _amax(
    pointers, sizes, scalings, work, amax_bits,
    PARAMETER: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Amax of each row of A and each column of scaled B, as the bits of non-negative floats (NaN sorts highest)."""
    work += tl.program_id(0) * 2
    adapter, tile = tl.load(work), tl.load(work + 1)
    pointers += adapter * 8
    sizes += adapter * 6
    width, height, rank = tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 4)
    amax_bits += adapter * 2 * RANK
    j = tl.arange(0, RANK)
    down_tiles = tl.cdiv(width, TILE)
    if tile < down_tiles:
        k = tile * TILE + tl.arange(0, TILE)
        magnitude_bits = tl.abs(_load_down(pointers, j, k, rank, width, PARAMETER)).to(tl.int32, bitcast=True)
        tl.atomic_max(amax_bits + RANK + j, tl.max(magnitude_bits, 1), mask=j < rank, sem="relaxed")
    else:
        n = (tile - down_tiles) * TILE + tl.arange(0, TILE)
        magnitudes = tl.abs(_load_up(pointers, n, j, rank, height, tl.load(scalings + adapter), PARAMETER, True))
        tl.atomic_max(amax_bits + j, tl.max(magnitudes.to(tl.int32, bitcast=True), 0), mask=j < rank, sem="relaxed")


@triton.jit
def _column_scale(amax_bits, j, rank):
    """Scale that maps the amax to the end of e4m3's range."""
    amax = tl.load(amax_bits + j, mask=j < rank, other=0).to(tl.float32, bitcast=True)
    return tl.where(amax < 1e-30, 1e-30, amax) / E4M3_MAX


@triton.jit
def _write(
    pointers, sizes, scalings, work, amax_bits,
    PARAMETER: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, ELEMENT: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Write A and B to their buffers. Runs in reverse order: what `_amax` read last may still be in cache."""
    work += (tl.num_programs(0) - 1 - tl.program_id(0)) * 2
    adapter, tile = tl.load(work), tl.load(work + 1)
    pointers += adapter * 8
    sizes += adapter * 6
    width, height, rank = tl.load(sizes), tl.load(sizes + 1), tl.load(sizes + 4)
    amax_bits += adapter * 2 * RANK
    j = tl.arange(0, RANK)
    down_tiles = tl.cdiv(width, TILE)
    if tile < down_tiles:
        k = tile * TILE + tl.arange(0, TILE)
        a = _load_down(pointers, j, k, rank, width, PARAMETER)
        a_mask = (j[:, None] < rank) & (k[None, :] < width)
        if QUANTIZED:
            a_scale = _column_scale(amax_bits + RANK, j, rank)
            tl.store(_pointer(pointers + 6, tl.float32) + j, a_scale, mask=(j < rank) & (tile == 0))
            a_out = to_e4m3(a * (1.0 / a_scale)[:, None])
        else:
            a_out = a.to(ELEMENT)
        matrix_down = _pointer(pointers + 3, ELEMENT)
        tl.store(matrix_down + j[:, None].to(tl.int64) * tl.load(sizes + 2) + k[None, :], a_out, mask=a_mask)
    else:
        n = (tile - down_tiles) * TILE + tl.arange(0, TILE)
        b = _load_up(pointers, n, j, rank, height, tl.load(scalings + adapter), PARAMETER, QUANTIZED)
        b_mask = (n[:, None] < height) & (j[None, :] < rank)
        if QUANTIZED:
            b_scale = _column_scale(amax_bits, j, rank)
            tl.store(_pointer(pointers + 7, tl.float32) + j, b_scale, mask=(j < rank) & (tile == down_tiles))
            b_out = to_e4m3(b * (1.0 / b_scale)[None, :])
        else:
            b_out = b.to(ELEMENT)
        matrix_up = _pointer(pointers + 5, ELEMENT) + n[:, None].to(tl.int64) * tl.load(sizes + 5)
        tl.store(matrix_up + j[None, :], b_out, mask=b_mask)
        factor_up = _pointer(pointers + 4, ELEMENT) + j[None, :].to(tl.int64) * tl.load(sizes + 3)
        tl.store(factor_up + n[:, None], b_out, mask=b_mask)


@triton.jit
def _project(
    qdata, qdata_stride, factor, factor_stride, segments, out, rows, ranks, splits,
    RANK: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """For each segment (start, width, column, rank): out[split, :, column:] = qdata @ factor.T over the split's part of
    the segment's width. BLOCKS programs process RANK rows of the factor each."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    segment = segments + tl.program_id(2) // BLOCKS * 4
    start = tl.multiple_of(tl.load(segment), 16)
    width = tl.multiple_of(tl.load(segment + 1), 16)
    column, rank = tl.load(segment + 2), tl.load(segment + 3)
    j = tl.program_id(2) % BLOCKS * RANK + tl.arange(0, RANK)
    split_width = tl.cdiv(tl.cdiv(width, splits), STEP) * STEP
    split_begin = split * split_width
    split_end = tl.minimum(split_begin + split_width, width)
    total = tl.zeros((ROWS, RANK), tl.float32)
    qdata_ptrs = qdata + m[:, None].to(tl.int64) * qdata_stride + start
    factor_ptrs = factor + j[:, None].to(tl.int64) * factor_stride + start
    for step_start in range(split_begin, split_end, STEP):
        k = step_start + tl.arange(0, STEP)
        x = tl.load(qdata_ptrs + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < split_end), other=0.0)
        f = tl.load(factor_ptrs + k[None, :], mask=(j[:, None] < rank) & (k[None, :] < split_end), other=0.0)
        if INTERPRETED:
            total = tl.dot(x.to(tl.float32), tl.trans(f.to(tl.float32)), total)
        else:
            total = tl.dot(x, tl.trans(f), total)
    to = out + (split * rows + m[:, None]).to(tl.int64) * ranks + column + j[None, :]
    tl.store(to, total, mask=(m[:, None] < rows) & (j[None, :] < rank))


@triton.jit
def _store_left_operand(left, left_stride, values, m, row_scales, ranks, rows, PRESCALED: tl.constexpr):
    """Store values [m, ranks] transposed, multiplied by their row scales and _PRESCALE if PRESCALED."""
    if PRESCALED:
        values *= (tl.load(row_scales + m, mask=m < rows, other=0.0) * _PRESCALE)[:, None]
    j = tl.arange(0, values.shape[1])[:, None]
    to = left + j.to(tl.int64) * left_stride + m[None, :]
    tl.store(to, tl.trans(values).to(left.dtype.element_ty), mask=(j < ranks) & (m[None, :] < rows))


@triton.jit
def _write_columns(
    total, m, ranks, factor_scales, matrix_scales, qdata, qdata_stride, scales, lora_mid, rows, width, pad_cols,
    factor, input_scales, down, up, left_stride,
    QUANTIZED: tl.constexpr, BACKWARD: tl.constexpr, PRESCALED: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the padding columns of rows `m` from the projected sums `total`.

    Forward: the dequantized sums are stored to `lora_mid`. Backward: the dequantized sums times `factor`, and
    `lora_mid`, are stored as the left operands `down` and `up`.
    """
    j = tl.arange(0, RANKS)
    mask = (m[:, None] < rows) & (j[None, :] < ranks)
    qdata_ptrs = qdata + m[:, None].to(tl.int64) * qdata_stride
    mid_ptrs = lora_mid + m[:, None] * ranks + j[None, :]
    pad_mask = (m[:, None] < rows) & (j[None, :] < pad_cols)
    if QUANTIZED:
        scale = tl.load(scales + m, mask=m < rows, other=1.0)
        total *= tl.load(factor_scales + j, mask=j < ranks, other=0.0)[None, :]
        if BACKWARD:
            mid_grad = total * (scale * factor)[:, None]
            _store_left_operand(down, left_stride, mid_grad, m, input_scales, ranks, rows, PRESCALED)
        else:
            tl.store(mid_ptrs, (total * scale[:, None]).to(lora_mid.dtype.element_ty), mask=mask)
        values = total * tl.load(matrix_scales + j, mask=j < ranks, other=0.0)[None, :]
        # If a column exceeds e4m3's range, the whole row is rescaled by a power of two, so that values quantized
        # earlier only change their exponents.
        excess = tl.max(tl.abs(values), 1) / E4M3_MAX
        rescale = tl.where(excess > 1.0, tl.exp2(tl.ceil(tl.log2(tl.maximum(excess, 1e-30)))), 1.0)
        if tl.max(rescale, 0) > 1.0:
            for start in range(0, width, CHUNK):
                k = start + tl.arange(0, CHUNK)
                rescale_mask = (m[:, None] < rows) & (k[None, :] < width) & (rescale[:, None] > 1.0)
                old = tl.load(qdata_ptrs + k[None, :], mask=rescale_mask, other=0.0).to(tl.float32)
                tl.store(qdata_ptrs + k[None, :], to_e4m3(old / rescale[:, None]), mask=rescale_mask)
            tl.store(scales + m, scale * rescale, mask=m < rows)
        if BACKWARD:
            saved_mid = tl.load(mid_ptrs, mask=mask, other=0.0).to(tl.float32) * (scale * rescale * _PRESCALE)[:, None]
            _store_left_operand(up, left_stride, saved_mid, m, input_scales, ranks, rows, False)
        tl.store(qdata_ptrs + width + j[None, :], to_e4m3(values / rescale[:, None]), mask=pad_mask)
    else:
        if BACKWARD:
            _store_left_operand(down, left_stride, total * factor, m, input_scales, ranks, rows, False)
            saved_mid = tl.load(mid_ptrs, mask=mask, other=0.0).to(tl.float32)
            _store_left_operand(up, left_stride, saved_mid, m, input_scales, ranks, rows, False)
        else:
            tl.store(mid_ptrs, total.to(lora_mid.dtype.element_ty), mask=mask)
        tl.store(qdata_ptrs + width + j[None, :], total.to(qdata.dtype.element_ty), mask=pad_mask)
    zeros = tl.zeros_like(total)
    for start in range(RANKS, pad_cols, RANKS):
        rest = (m[:, None] < rows) & (start + j[None, :] < pad_cols)
        tl.store(qdata_ptrs + width + start + j[None, :], zeros.to(qdata.dtype.element_ty), mask=rest)


@triton.jit
def _place(
    raw, splits, ranks, factor_scales, matrix_scales, qdata, qdata_stride, scales, lora_mid, rows, width, pad_cols,
    factor, input_scales, down, up, left_stride,
    QUANTIZED: tl.constexpr, BACKWARD: tl.constexpr, PRESCALED: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sum the splits and write the columns."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANKS)
    mask = (m[:, None] < rows) & (j[None, :] < ranks)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for split in range(splits):
        total += tl.load(raw + (split * rows + m[:, None]).to(tl.int64) * ranks + j[None, :], mask=mask, other=0.0)
    _write_columns(
        total, m, ranks, factor_scales, matrix_scales, qdata, qdata_stride, scales, lora_mid, rows, width, pad_cols,
        factor, input_scales, down, up, left_stride, QUANTIZED, BACKWARD, PRESCALED, RANKS, CHUNK,
    )  # fmt: skip


@triton.jit
def _project_and_place(
    proj_factor, proj_factor_stride, segments, count,
    ranks, factor_scales, matrix_scales, qdata, qdata_stride, scales, lora_mid, rows, width, pad_cols,
    factor, input_scales, down, up, left_stride,
    QUANTIZED: tl.constexpr, BACKWARD: tl.constexpr, PRESCALED: tl.constexpr,
    RANKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fused `_project` and `_place` for whole rows: the sums stay in registers."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, RANKS)
    total = tl.zeros((ROWS, RANKS), tl.float32)
    for index in range(count):
        start = tl.multiple_of(tl.load(segments + index * 4), 16)
        extent = tl.multiple_of(tl.load(segments + index * 4 + 1), 16)
        local_rank = j - tl.load(segments + index * 4 + 2)  # rank index within its adapter
        own_ranks = (local_rank >= 0) & (local_rank < tl.load(segments + index * 4 + 3))
        qdata_ptrs = qdata + m[:, None].to(tl.int64) * qdata_stride + start
        factor_ptrs = proj_factor + local_rank[:, None].to(tl.int64) * proj_factor_stride + start
        for step_start in range(0, extent, STEP):
            k = step_start + tl.arange(0, STEP)
            x = tl.load(qdata_ptrs + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < extent), other=0.0)
            f = tl.load(factor_ptrs + k[None, :], mask=own_ranks[:, None] & (k[None, :] < extent), other=0.0)
            if INTERPRETED:
                total = tl.dot(x.to(tl.float32), tl.trans(f.to(tl.float32)), total)
            else:
                total = tl.dot(x, tl.trans(f), total)
    _write_columns(
        total, m, ranks, factor_scales, matrix_scales, qdata, qdata_stride, scales, lora_mid, rows, width, pad_cols,
        factor, input_scales, down, up, left_stride, QUANTIZED, BACKWARD, PRESCALED, RANKS, CHUNK,
    )  # fmt: skip


def pad_rank(rank: int) -> int:
    """Pad to a power of two of at least 16, the tensor cores' minimum."""
    return max(16, block_of(rank))


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float8_e4m3fn: tl.float8e4nv}


class Tables(NamedTuple):
    """Device tables that describe all adapters to `_amax` and `_write`."""

    pointers: Tensor
    """[adapters, 8]: A, B, scales, matrix_down, factor_up, matrix_up, scale_down, scale_up; 0: none."""
    sizes: Tensor
    """[adapters, 6]: width, height, strides of matrix_down and factor_up; rank, stride of matrix_up."""
    scalings: Tensor
    work: Tensor
    """[programs, 2]: adapter index and tile index; tiles of A come first."""
    constants: dict[str, int]


def tables(
    pointers: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    scalings: Sequence[float],
    device: torch.device,
) -> Tables:
    rank = block_of(max(row[4] for row in sizes))
    tile = max(16, _WRITE_VALUES // rank)
    counts = torch.tensor([ceil_div(width, tile) + ceil_div(height, tile) for width, height, *_ in sizes])
    adapter = torch.arange(len(counts)).repeat_interleave(counts)
    tile_index = torch.arange(len(adapter)) - (counts.cumsum(0) - counts)[adapter]
    pointer_table, size_table = torch.tensor(pointers), torch.tensor(sizes)
    return Tables(
        pointer_table.to(device),
        size_table.to(device, torch.int32),
        torch.tensor(scalings, dtype=torch.float32).to(device),
        torch.stack([adapter, tile_index], dim=1).to(device, torch.int32),
        {"RANK": rank, "TILE": tile},
    )


def write(adapter_tables: Tables, parameter: torch.dtype, element: torch.dtype) -> None:
    pointers, sizes, scalings, work, shape = adapter_tables
    grid, quantized = (work.shape[0],), element == torch.float8_e4m3fn
    amax_bits = torch.zeros(pointers.shape[0], 2, shape["RANK"], dtype=torch.int32, device=pointers.device)
    arguments = pointers, sizes, scalings, work, amax_bits
    constants = {"PARAMETER": _ELEMENTS[parameter], **shape}
    if quantized:
        launch(_amax, grid, *arguments, **constants, num_warps=_WRITE_WARPS)
    constants |= {"ELEMENT": _ELEMENTS[element], "QUANTIZED": quantized}
    launch(_write, grid, *arguments, **constants, num_warps=_WRITE_WARPS)


def _rows_per_program(limit: int, rank: int) -> int:
    return max(16, min(limit, _TILE // block_of(rank)))


def project(qdata: Tensor, factor: Tensor, segments: Tensor, rank: int, out: Tensor) -> None:
    splits, rows, ranks = out.shape
    per_program = min(_PROJECT_RANKS, pad_rank(rank))
    blocks = ceil_div(rank, per_program)
    launch(
        _project, (ceil_div(rows, PROJECT_ROWS), splits, segments.shape[0] * blocks),
        qdata, qdata.stride(0), factor, factor.stride(0), segments, out, rows, ranks, splits,
        RANK=per_program, BLOCKS=blocks, ROWS=PROJECT_ROWS, STEP=_PROJECT_BYTES // qdata.element_size(),
        num_warps=4, num_stages=_project_stages(qdata, per_program),
    )  # fmt: skip


def _project_stages(qdata: Tensor, per_program: int) -> int:
    _, shared_memory = sm_limits(qdata.device)
    return max(2, min(_PROJECT_STAGES, shared_memory // ((PROJECT_ROWS + per_program) * _PROJECT_BYTES)))


class BackwardOutputs(NamedTuple):
    """Additional arguments of the backward pass: left operands `down` and `up` are outputs."""

    factor: float
    input_scales: Tensor | None
    down: Tensor
    up: Tensor


class ColumnTarget(NamedTuple):
    """Destination of the projected columns, and the scales to write them with."""

    factor_scales: Tensor
    matrix_scales: Tensor
    qdata: Tensor
    width: int
    scales: Tensor | None
    lora_mid: Tensor
    backward: BackwardOutputs | None

    def arguments(self) -> tuple[Any, ...]:
        """Kernel arguments from `factor_scales` on."""
        qdata, backward = self.qdata, self.backward
        left_operands: tuple[Any, ...] = (1.0, None, None, None, 0)
        if backward is not None:
            left_operands = (*backward, backward.down.stride(0))
        return (
            self.factor_scales, self.matrix_scales, qdata, qdata.stride(0), self.scales, self.lora_mid, qdata.shape[0],
            self.width, qdata.shape[1] - self.width, *left_operands,
        )  # fmt: skip

    def constants(self) -> dict[str, bool]:
        prescaled = self.backward is not None and self.backward.input_scales is not None
        return {"QUANTIZED": self.scales is not None, "BACKWARD": self.backward is not None, "PRESCALED": prescaled}


def place(raw: Tensor, target: ColumnTarget) -> None:
    splits, rows, ranks = raw.shape
    padded = pad_rank(ranks)
    per_program = _rows_per_program(_PLACE_ROWS, padded)
    launch(
        _place, (ceil_div(rows, per_program),), raw, splits, ranks, *target.arguments(),
        **target.constants(), RANKS=padded, ROWS=per_program, CHUNK=_PLACE_CHUNK,
    )  # fmt: skip


def can_project_and_place(ranks: int) -> bool:
    """Whether one program of `project_and_place` can hold all columns of a row."""
    return pad_rank(ranks) <= _PROJECT_RANKS


def project_and_place(factor: Tensor, segments: Tensor, ranks: int, target: ColumnTarget) -> None:
    qdata, padded = target.qdata, pad_rank(ranks)
    launch(
        _project_and_place, (ceil_div(qdata.shape[0], PROJECT_ROWS),),
        factor, factor.stride(0), segments, segments.shape[0], ranks, *target.arguments(),
        **target.constants(), RANKS=padded, ROWS=PROJECT_ROWS, STEP=_PROJECT_BYTES // qdata.element_size(),
        CHUNK=_PLACE_CHUNK, num_warps=4, num_stages=_project_stages(qdata, padded),
    )  # fmt: skip
