"""A LoRA adapter as extra columns of the product it accompanies.

    y  = x W' + s (x A') B'   is   [x | x A'] times [W | s B] transposed
    dx = g W  + s (g B) A     is   [g | s g B] times [W over A]

So base and adapters leave the tensor cores as one product, and the adapter costs no pass over the output. One matrix
serves both directions: W in its corner, s B in the columns to its right, A in the rows below. Several layers that read
the same input (q, k, v) share one matrix; each has its own columns, which are zero in the others' rows.

In e4m3 the adapter's part shares the row scales of what it stands beside. A unit per column brings the matrix's side to
the end of e4m3's range, and the other side is multiplied by that unit. If a row's columns then exceed the range, the
row moves to a larger scale. So nothing is ever clamped.

Columns are added by 128s, of which the ranks use the first few, so that rows begin where lines of the cache do and the
tensor cores' tiles are full: with 64 the seven products of a layer of Llama-3.1-8B's shape took 5.6 instead of 5.4 ms,
each in a long row of its own, and with 16 they took a fifth longer (H200, 8,192 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.lora_columns.reference import (
    reference_gradient,
    reference_left,
    reference_place,
    reference_project,
    reference_write,
)
from pantheraml.kernels.lora_columns.sides import Left, Side
from pantheraml.kernels.lora_columns.spans import PROJECT_ROWS

COLUMNS = 128
"""Extra columns come in multiples of this."""
DIVISOR = 16
"""Widths and heights of all layers are multiples of this."""


_PROGRAMS = 128
"""About as many as the processors of a large GPU."""


class AdapterPlaces(NamedTuple):
    """Where one adapter (A [rank, in], B [out, rank]) is written: what products and projections read."""

    matrix_up: Tensor
    """[out, rank], in the matrix right of W."""
    matrix_down: Tensor
    """[rank, in], in the matrix below W. Also what `project` takes on the way forward."""
    scales: Tensor | None
    """[out], those of W's rows; None: the matrix is not quantised."""
    factor_up: Tensor
    """[rank, out]: `matrix_up` transposed, for `project` on the way back."""
    unit_down: Tensor
    """[rank]: what 1 stands for in `matrix_down`."""
    unit_up: Tensor
    """[rank]: what 1 stands for in `matrix_up`."""
    turned_down: Tensor | None
    """[in, rank]: `matrix_down` transposed, in the matrix of the way back; None: there is none of its own."""


class Adapter(NamedTuple):
    down: Tensor
    up: Tensor
    scaling: float
    places: AdapterPlaces


def _pointers(adapter: Adapter) -> list[int]:
    """As `triton_kernel.Tables` has them."""
    down, up, _, p = adapter
    ordered = down, up, p.scales, p.matrix_down, p.factor_up, p.matrix_up, p.turned_down, p.unit_down, p.unit_up
    return [0 if place is None else place.data_ptr() for place in ordered]


def _numbers(adapter: Adapter) -> list[int]:
    """As `triton_kernel.Tables` has them."""
    (rank, width), height, p = adapter.down.shape, adapter.up.shape[0], adapter.places
    turned = 0 if p.turned_down is None else p.turned_down.stride(0)
    return [width, height, p.matrix_down.stride(0), p.factor_up.stride(0), rank, p.matrix_up.stride(0), turned]


class AdapterTable:
    """Adapters of any number of layers, all in one dtype, to be written together: two kernel launches for a model.

    It reads where A and B were when it was made, and keeps that memory alive: a parameter that is given other memory
    leaves the table as it was."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = [adapter._replace(down=adapter.down.detach(), up=adapter.up.detach()) for adapter in adapters]
        self._tables = None
        if runs_triton(adapters[0].places.matrix_up):
            from pantheraml.kernels.lora_columns import triton_kernel

            pointers, numbers = list(map(_pointers, adapters)), list(map(_numbers, adapters))
            scalings, device = [adapter.scaling for adapter in adapters], adapters[0].places.matrix_up.device
            self._tables = triton_kernel.tables(pointers, numbers, scalings, device)

    def write(self) -> None:
        """Put all adapters' current values in their places."""
        if self._tables is None:
            for down, up, scaling, places in self.adapters:
                reference_write(down, up, scaling, *places)
            return
        from pantheraml.kernels.lora_columns import triton_kernel

        first = self.adapters[0]
        triton_kernel.write(self._tables, first.down.dtype, first.places.matrix_up.dtype)


def project(payload: Tensor, factor: Tensor, segments: Tensor, rank: int, out: Tensor) -> None:
    """For each segment: payload[:, start:start + width] @ factor[:rank, start:start + width] transposed, into `out`
    [splits, rows, columns] from its first column on, to be summed over the splits. `rank` is the largest."""
    if runs_triton(payload):
        from pantheraml.kernels.lora_columns import triton_kernel

        triton_kernel.project(payload, factor, segments, rank, out)
    else:
        reference_project(payload, factor, segments, out)


def splits_for(rows: int, width: int) -> int:
    """Into how many parts `project` cuts the width, so that a few thousand rows fill the GPU."""
    return max(1, min(4, width // 1024, -(-_PROGRAMS * PROJECT_ROWS // max(1, rows))))


class Projection(NamedTuple):
    """What the columns behind rows are made with."""

    factor: Tensor
    """[largest rank, width]."""
    segments: Tensor
    """Which part of a row becomes which columns, as `project` reads it."""
    ranks: int
    """Columns of all adapters."""
    units: tuple[Tensor, Tensor]
    """Those of the factor, and of the matrix that the columns will meet."""


def add_columns(
    payload: Tensor, width: int, scales: Tensor | None, projection: Projection, dtype: torch.dtype
) -> Tensor:
    """Write x A' behind the first `width` columns of `payload`, and zeros after it. Returns it in real units [rows,
    ranks]. `scales` and the payload change where a row needs a larger scale."""
    if not _in_one_go(payload, width, projection):
        return place_columns(_projected(payload, width, projection), projection.units, payload, width, scales, dtype)
    from pantheraml.kernels.lora_columns import triton_kernel

    middle = torch.empty(payload.shape[0], projection.ranks, dtype=dtype, device=payload.device)
    target = triton_kernel.Target(*projection.units, payload, width, scales, middle, None)
    triton_kernel.project_and_place(projection.factor, projection.segments, projection.ranks, target)
    return middle


def add_columns_back(
    payload: Tensor,
    width: int,
    scales: Tensor | None,
    projection: Projection,
    factor: float,
    middle: Tensor,
    input_scales: Tensor | None,
) -> tuple[Left, Left]:
    """`add_columns` for a gradient, and the left sides of the adapters' gradients: see `place_columns_back`."""
    if not _in_one_go(payload, width, projection):
        raw = _projected(payload, width, projection)
        return place_columns_back(raw, projection.units, payload, width, scales, factor, middle, input_scales)
    from pantheraml.kernels.lora_columns import triton_kernel

    down, up = (_room_for_left(middle.shape, middle.dtype, payload.device) for _ in range(2))
    back = triton_kernel.Back(factor, input_scales, down, up)
    target = triton_kernel.Target(*projection.units, payload, width, scales, middle, back)
    triton_kernel.project_and_place(projection.factor, projection.segments, projection.ranks, target)
    return Left(down, input_scales is not None), Left(up, scales is not None)


def _in_one_go(payload: Tensor, width: int, projection: Projection) -> bool:
    """Whether there are so many rows that programs need not share them, and so few columns that one can write all."""
    if not runs_triton(payload) or splits_for(payload.shape[0], width) > 1:
        return False
    from pantheraml.kernels.lora_columns import triton_kernel

    return triton_kernel.projects_and_places(projection.ranks)


def _projected(payload: Tensor, width: int, projection: Projection) -> Tensor:
    """[splits, rows, ranks], to be summed."""
    factor, rows = projection.factor, payload.shape[0]
    shape = splits_for(rows, width), rows, projection.ranks
    raw = torch.empty(shape, dtype=torch.float32, device=payload.device)
    project(payload, factor, projection.segments, factor.shape[0], raw)
    return raw


def place_columns(
    raw: Tensor,
    units: tuple[Tensor, Tensor],
    payload: Tensor,
    width: int,
    scales: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`add_columns` of what `project` gave."""
    middle = torch.empty(raw.shape[1:], dtype=dtype, device=raw.device)
    if runs_triton(payload):
        from pantheraml.kernels.lora_columns import triton_kernel

        triton_kernel.place(raw, triton_kernel.Target(*units, payload, width, scales, middle, None))
    else:
        reference_place(raw, *units, payload, width, scales, middle)
    return middle


def place_columns_back(
    raw: Tensor,
    units: tuple[Tensor, Tensor],
    payload: Tensor,
    width: int,
    scales: Tensor | None,
    factor: float,
    middle: Tensor,
    input_scales: Tensor | None,
) -> tuple[Left, Left]:
    """`place_columns` for a gradient, and the left sides of the adapters' gradients: of A, which is raw in real units
    times `factor`, to meet rows with `input_scales` (None: not known yet, so it is not lifted); and of B, which is
    `middle` [rows, ranks] from the way forward, to meet the payload."""
    down, up = (_room_for_left(middle.shape, middle.dtype, raw.device) for _ in range(2))
    if runs_triton(payload):
        from pantheraml.kernels.lora_columns import triton_kernel

        back = triton_kernel.Back(factor, input_scales, down, up)
        triton_kernel.place(raw, triton_kernel.Target(*units, payload, width, scales, middle, back))
    else:
        in_real_units = torch.empty_like(middle)
        reference_place(raw, *units, payload, width, scales, in_real_units)
        reference_left(in_real_units * factor, input_scales, down)
        reference_left(middle, scales, up)
    return Left(down, input_scales is not None), Left(up, scales is not None)


def _room_for_left(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, ranks = shape
    return torch.empty(ranks, -(-rows // 64) * 64, dtype=dtype, device=device)  # so that all its rows are aligned


def adapter_gradients(down: Side, up: Side) -> None:
    """Of A and of B."""
    if runs_triton(down.payload):
        from pantheraml.kernels.lora_columns import triton_gradient

        triton_gradient.gradients(down, up)
    else:
        for side in (down, up):
            reference_gradient(side)
