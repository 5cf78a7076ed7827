"""LoRA adapters as extra columns of the base matmul.

    y  = x W' + s (x A') B'   is   [x | x A'] @ [W | s B]'
    dx = g W  + s (g B) A     is   [g | s g B] @ [W over A]

Base and adapter are one matmul, and the adapter needs no extra pass over the output. One matrix serves forward and
backward: W in the corner, s B in the columns to its right, A in the rows below. Layers with the same input (q, k, v)
share one matrix; each has its own adapter columns, which are zero in the other layers' rows.

In e4m3, adapter columns share the row scales of the values next to them. A scale per column maps the matrix's adapter
part to the end of e4m3's range, and the other operand is multiplied by that scale. If a row's columns then exceed the
range, the whole row is rescaled, so nothing is ever clamped.

Columns are padded to multiples of 128, so that rows are aligned to cache lines and the tensor cores' tiles are full.
The seven matmuls of a Llama-3.1-8B layer, each timed over many repeats, took 5.4 ms; with multiples of 64 they took
5.6 ms, and with 16 a fifth longer (H200, 8,192 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.lora_columns.adapter_layout import PROJECT_ROWS
from pantheraml.kernels.lora_columns.grad_operands import GradMatmul, LeftOperand
from pantheraml.kernels.lora_columns.reference import (
    reference_gradient,
    reference_left_operand,
    reference_place,
    reference_project,
    reference_write,
)

COLUMNS = 128
"""Padding columns are a multiple of this."""
DIVISOR = 16
"""Required divisor of every layer's width and height."""


_PROGRAMS = 128
"""About the number of SMs of a large GPU."""


class AdapterBuffers(NamedTuple):
    """Destination buffers of one adapter (A [rank, in], B [out, rank]), read by matmuls and projections."""

    matrix_up: Tensor
    """[out, rank]: s B, in the matrix right of W."""
    matrix_down: Tensor
    """[rank, in]: A, in the matrix below W; also the factor of `project` in the forward pass."""
    scales: Tensor | None
    """[out]: scales of W's rows; None if the matrix is not quantized."""
    factor_up: Tensor
    """[rank, out]: `matrix_up` transposed, the factor of `project` in the backward pass."""
    scale_down: Tensor
    """[rank]: quantization scales of `matrix_down`."""
    scale_up: Tensor
    """[rank]: quantization scales of `matrix_up`."""


class Adapter(NamedTuple):
    down: Tensor
    up: Tensor
    scaling: float
    buffers: AdapterBuffers


def _pointers(adapter: Adapter) -> list[int]:
    """Row of `triton_kernel.Tables.pointers`."""
    down, up, _, p = adapter
    ordered = down, up, p.scales, p.matrix_down, p.factor_up, p.matrix_up, p.scale_down, p.scale_up
    return [0 if tensor is None else tensor.data_ptr() for tensor in ordered]


def _sizes(adapter: Adapter) -> list[int]:
    """Row of `triton_kernel.Tables.sizes`."""
    (rank, width), height, p = adapter.down.shape, adapter.up.shape[0], adapter.buffers
    return [width, height, p.matrix_down.stride(0), p.factor_up.stride(0), rank, p.matrix_up.stride(0)]


class AdapterTable:
    """Adapters of many layers, all of one dtype, written together: two kernel launches for a whole model.

    It holds the storage that A and B had at construction: if a parameter is later assigned new storage, the table keeps
    reading the old one.
    """

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = [adapter._replace(down=adapter.down.detach(), up=adapter.up.detach()) for adapter in adapters]
        self._tables = None
        if runs_triton(adapters[0].buffers.matrix_up):
            from pantheraml.kernels.lora_columns import triton_kernel

            pointers, sizes = list(map(_pointers, adapters)), list(map(_sizes, adapters))
            scalings, device = [adapter.scaling for adapter in adapters], adapters[0].buffers.matrix_up.device
            self._tables = triton_kernel.tables(pointers, sizes, scalings, device)

    def write(self) -> None:
        """Copy the current values of all adapters to their buffers."""
        if self._tables is None:
            for down, up, scaling, buffers in self.adapters:
                reference_write(down, up, scaling, *buffers)
            return
        from pantheraml.kernels.lora_columns import triton_kernel

        first = self.adapters[0]
        triton_kernel.write(self._tables, first.down.dtype, first.buffers.matrix_up.dtype)


def project(qdata: Tensor, factor: Tensor, segments: Tensor, rank: int, out: Tensor) -> None:
    """For each segment, write qdata[:, start:start + width] @ factor[:rank, start:start + width].T to `out` [splits,
    rows, columns] from the segment's first column on. The splits are partial sums. `rank` is the largest rank."""
    if runs_triton(qdata):
        from pantheraml.kernels.lora_columns import triton_kernel

        triton_kernel.project(qdata, factor, segments, rank, out)
    else:
        reference_project(qdata, factor, segments, out)


def splits_for(rows: int, width: int) -> int:
    """Number of splits of the width in `project`, so that a few thousand rows fill the GPU."""
    return max(1, min(4, width // 1024, -(-_PROGRAMS * PROJECT_ROWS // max(1, rows))))


class Projection(NamedTuple):
    """How the adapter columns of a row are computed."""

    factor: Tensor
    """[largest rank, width]."""
    segments: Tensor
    """Table from `segment_table`."""
    ranks: int
    """Total columns of all adapters."""
    column_scales: tuple[Tensor, Tensor]
    """Scales of the factor, and of the matrix that the columns are multiplied with."""


def add_columns(qdata: Tensor, width: int, scales: Tensor | None, projection: Projection, dtype: torch.dtype) -> Tensor:
    """Write x A' after the first `width` columns of `qdata`, then zeros. Returns the dequantized x A' [rows, ranks].

    Rows that need a larger scale are rescaled in place, in `scales` and `qdata`.
    """
    if not _can_fuse(qdata, width, projection):
        raw = _project_splits(qdata, width, projection)
        return place_columns(raw, projection.column_scales, qdata, width, scales, dtype)
    from pantheraml.kernels.lora_columns import triton_kernel

    lora_mid = torch.empty(qdata.shape[0], projection.ranks, dtype=dtype, device=qdata.device)
    target = triton_kernel.ColumnTarget(*projection.column_scales, qdata, width, scales, lora_mid, None)
    triton_kernel.project_and_place(projection.factor, projection.segments, projection.ranks, target)
    return lora_mid


def add_columns_backward(
    qdata: Tensor,
    width: int,
    scales: Tensor | None,
    projection: Projection,
    factor: float,
    lora_mid: Tensor,
    input_scales: Tensor | None,
) -> tuple[LeftOperand, LeftOperand]:
    """`add_columns` for a gradient. Returns the left operands of A and B gradients (see `place_columns_backward`)."""
    if not _can_fuse(qdata, width, projection):
        raw = _project_splits(qdata, width, projection)
        return place_columns_backward(
            raw, projection.column_scales, qdata, width, scales, factor, lora_mid, input_scales
        )
    from pantheraml.kernels.lora_columns import triton_kernel

    down, up = (_empty_left_operand(lora_mid.shape, lora_mid.dtype, qdata.device) for _ in range(2))
    backward = triton_kernel.BackwardOutputs(factor, input_scales, down, up)
    target = triton_kernel.ColumnTarget(*projection.column_scales, qdata, width, scales, lora_mid, backward)
    triton_kernel.project_and_place(projection.factor, projection.segments, projection.ranks, target)
    return LeftOperand(down, input_scales is not None), LeftOperand(up, scales is not None)


def _can_fuse(qdata: Tensor, width: int, projection: Projection) -> bool:
    """Whether projecting and placing can be one kernel: enough rows to need no splits, and few enough ranks."""
    if not runs_triton(qdata) or splits_for(qdata.shape[0], width) > 1:
        return False
    from pantheraml.kernels.lora_columns import triton_kernel

    return triton_kernel.can_project_and_place(projection.ranks)


def _project_splits(qdata: Tensor, width: int, projection: Projection) -> Tensor:
    """Partial sums of the projection, [splits, rows, ranks]."""
    factor, rows = projection.factor, qdata.shape[0]
    shape = splits_for(rows, width), rows, projection.ranks
    raw = torch.empty(shape, dtype=torch.float32, device=qdata.device)
    project(qdata, factor, projection.segments, factor.shape[0], raw)
    return raw


def place_columns(
    raw: Tensor,
    column_scales: tuple[Tensor, Tensor],
    qdata: Tensor,
    width: int,
    scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`add_columns`, given the output of `project`."""
    lora_mid = torch.empty(raw.shape[1:], dtype=dtype, device=raw.device)
    if runs_triton(qdata):
        from pantheraml.kernels.lora_columns import triton_kernel

        triton_kernel.place(raw, triton_kernel.ColumnTarget(*column_scales, qdata, width, scales, lora_mid, None))
    else:
        reference_place(raw, *column_scales, qdata, width, scales, lora_mid)
    return lora_mid


def place_columns_backward(
    raw: Tensor,
    column_scales: tuple[Tensor, Tensor],
    qdata: Tensor,
    width: int,
    scales: Tensor | None,
    factor: float,
    lora_mid: Tensor,
    input_scales: Tensor | None,
) -> tuple[LeftOperand, LeftOperand]:
    """`place_columns` for a gradient. Returns the left operands of the gradients of A and B.

    A's is the dequantized `raw` times `factor`; its right operand has row scales `input_scales` (None: not known yet,
    so it is not prescaled). B's is `lora_mid` [rows, ranks] from the forward pass; its right operand is `qdata`.
    """
    down, up = (_empty_left_operand(lora_mid.shape, lora_mid.dtype, raw.device) for _ in range(2))
    if runs_triton(qdata):
        from pantheraml.kernels.lora_columns import triton_kernel

        backward = triton_kernel.BackwardOutputs(factor, input_scales, down, up)
        triton_kernel.place(raw, triton_kernel.ColumnTarget(*column_scales, qdata, width, scales, lora_mid, backward))
    else:
        lora_mid_grad = torch.empty_like(lora_mid)
        reference_place(raw, *column_scales, qdata, width, scales, lora_mid_grad)
        reference_left_operand(lora_mid_grad * factor, input_scales, down)
        reference_left_operand(lora_mid, scales, up)
    return LeftOperand(down, input_scales is not None), LeftOperand(up, scales is not None)


def _empty_left_operand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, ranks = shape
    return torch.empty(ranks, -(-rows // 64) * 64, dtype=dtype, device=device)  # keeps all rows aligned


def adapter_gradients(down: GradMatmul, up: GradMatmul) -> None:
    """Compute the gradients of A (`down`) and B (`up`)."""
    if runs_triton(down.qdata):
        from pantheraml.kernels.lora_columns import triton_gradient

        triton_gradient.gradients(down, up)
    else:
        for matmul in (down, up):
            reference_gradient(matmul)
