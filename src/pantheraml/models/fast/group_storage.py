"""Storage of a linear group's matrix.

Forward and backward read one matrix: the frozen weights of the group's layers stacked by rows, extra columns on the
right for every adapter's B, and extra rows below for every adapter's A. bf16 and e4m3 weights are stored in that form.
Tensor cores read e4m3 along the inner dimension only, so backward needs the bytes transposed: it transposes just before
the matmul or, where memory allows, both layouts are stored. nf4 weights are not stored in that form, which would take
twice their memory: each direction dequantizes its own matrix just before the matmul and frees it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, LIMIT, shared_scale, to_e4m3
from pantheraml.kernels.fp8.matmul import transposed
from pantheraml.kernels.nf4.to_fp8 import nf4_row_scales, nf4_to_fp8
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.specs.plan import Layouts


class GroupShape(NamedTuple):
    """Shape of a group's matrix: weights [height, width], plus `pad_cols` columns and rows, of which `ranks` are
    used.
    """

    height: int
    width: int
    ranks: int
    pad_cols: int


class GroupStorage(Protocol):
    @property
    def scales(self) -> Tensor | None:
        """[height], scales of the weight rows; None if the matrix is not quantized."""
        ...

    up: Tensor
    """[height, ranks]: destination of every adapter's B, scaled."""
    down: Tensor
    """[ranks, width]: destination of every adapter's A."""

    @property
    def matrix_down_t(self) -> Tensor | None:
        """[width, ranks]: destination of a transposed copy of A; None if there is none."""
        ...

    def frozen_weights(self) -> Tensor:
        """[height, width]: the weights alone, with any row stride."""
        ...

    def forward_matrix(self) -> Tensor:
        """[height, width + pad_cols]: weights and B."""
        ...

    def backward_matrix(self) -> Tensor:
        """[width, height + pad_cols]: weights over A, transposed."""
        ...


class ResidentMatrix:
    """bf16 or e4m3 weights, which become views of one matrix."""

    def __init__(self, bases: Sequence[Any], shape: GroupShape) -> None:
        """`bases` are all `nn.Linear` or all `FP8Linear`."""
        height, width, ranks, pad_cols = shape
        self._matrix = _zeros_like(bases[0], height + pad_cols, width + pad_cols)
        self._height, self._width = height, width
        self.up = self._matrix[:height, width : width + ranks]
        self.down = self._matrix[height : height + ranks, :width]
        self.matrix_down_t = None
        self.scales = _move_weights(bases, self._matrix[:height, :width])

    def frozen_weights(self) -> Tensor:
        return self._matrix[: self._height, : self._width]

    def forward_matrix(self) -> Tensor:
        return self._matrix[: self._height]

    def backward_matrix(self) -> Tensor:
        matrix = self._matrix[:, : self._width]
        return matrix.T if self.scales is None else transposed(matrix)


class TwoLayoutMatrix:
    """e4m3 weights, which become views of one matrix, with a stored transpose for backward.

    Backward then need not transpose, and the bytes are those that `ResidentMatrix` would build. Code that writes to a
    weight through `.data`, which does not bump its version, has to call `sync_transpose`.
    """

    def __init__(self, bases: Sequence[Any], shape: GroupShape) -> None:
        """`bases` are all `FP8Linear`."""
        height, width, ranks, pad_cols = shape
        self.forward_layout = _zeros_like(bases[0], height, width + pad_cols)
        self.backward_layout = _zeros_like(bases[0], width, height + pad_cols)
        self._height, self._width = height, width
        self.up = self.forward_layout[:, width : width + ranks]
        self.down = _zeros_like(bases[0], ranks, width)
        self.matrix_down_t = self.backward_layout[:, height : height + ranks]
        self.scales = _move_weights(bases, self.forward_layout[:, :width])
        self.sync_transpose()

    def sync_transpose(self) -> None:
        """Copy the forward layout's weights to the backward layout."""
        self.backward_layout[:, : self._height] = transposed(self.forward_layout[:, : self._width])

    def frozen_weights(self) -> Tensor:
        return self.forward_layout[:, : self._width]

    def forward_matrix(self) -> Tensor:
        return self.forward_layout

    def backward_matrix(self) -> Tensor:
        return self.backward_layout


def _zeros_like(base: Any, rows: int, columns: int) -> Tensor:
    like: Tensor = base.qweight if isinstance(base, FP8Linear) else base.weight
    return torch.zeros(rows, columns, dtype=like.dtype, device=like.device)


def _move_weights(bases: Sequence[Any], weights: Tensor) -> Tensor | None:
    """Stack the layers' weights into `weights`, of which they become views; return its row scales, if any."""
    quantized = isinstance(bases[0], FP8Linear)
    scales = torch.empty(len(weights), dtype=torch.float32, device=weights.device) if quantized else None
    shared = _common_scale(bases) if quantized else None
    start = 0
    for base in bases:
        rows = slice(start, start + base.out_features)
        view = weights[rows]
        if scales is None:
            view.copy_(base.weight)
            base.weight.data = view
        else:
            if shared is None or bool(base.scale[0] == shared):
                view.copy_(base.qweight)
            else:  # powers of two: only exponents change
                view.copy_(to_e4m3(base.qweight.float() * (base.scale[0] / shared)))
            scales[rows] = base.scale if shared is None else shared
            base.qweight, base.scale = view, scales[rows]
        start = rows.stop
    return scales


def _common_scale(bases: Sequence[Any]) -> Tensor | None:
    """Return the largest of the layers' scales, if each layer has one and they differ by powers of two."""
    if not all(base.shared_scale for base in bases):
        return None
    scales = torch.stack([base.scale[0] for base in bases])
    ratios = torch.log2(scales / scales.amax())
    return scales.amax() if bool((ratios == ratios.round()).all()) else None


class DequantizedMatrix:
    """nf4 weights, left where they are; each direction's e4m3 matrix is built on demand."""

    def __init__(self, bases: Sequence[Any], shape: GroupShape) -> None:
        """`bases` are all `NF4Linear`."""
        self._bases, self._shape = bases, shape
        device = bases[0].qweight.device
        self.scales = torch.cat([nf4_row_scales(base.quantized_weight()) for base in bases])
        shared = shared_scale(self.scales * LIMIT)
        if shared is not None:
            self.scales.copy_(shared)
        self.up = torch.zeros(shape.height, shape.ranks, dtype=E4M3, device=device)
        self.down = torch.zeros(shape.ranks, shape.width, dtype=E4M3, device=device)
        self.matrix_down_t = None

    def frozen_weights(self) -> Tensor:
        height, width, *_ = self._shape
        weights = torch.empty(height, width, dtype=E4M3, device=self.up.device)
        self._fill(weights)
        return weights

    def forward_matrix(self) -> Tensor:
        height, width, *_ = self._shape
        matrix = self._empty(height, width)
        self._fill(matrix[:, :width])
        return self._with_adapters(matrix, width, self.up)

    def backward_matrix(self) -> Tensor:
        height, width, *_ = self._shape
        matrix = self._empty(width, height)
        self._fill(matrix[:, :height].T)
        return self._with_adapters(matrix, height, self.down.T)

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns + self._shape.pad_cols, dtype=E4M3, device=self.up.device)

    def _fill(self, weights: Tensor) -> None:
        start = 0
        for base in self._bases:
            rows = slice(start, start + base.out_features)
            nf4_to_fp8(base.quantized_weight(), self.scales[rows], weights[rows])
            start = rows.stop

    def _with_adapters(self, matrix: Tensor, column: int, adapters: Tensor) -> Tensor:
        end = column + self._shape.ranks
        matrix[:, column:end] = adapters
        # Uninitialized bytes may be NaN, which the zeros they meet in the matmul would not cancel.
        matrix[:, end:].view(torch.uint8).zero_()
        return matrix


def make_storage(bases: Sequence[Any], shape: GroupShape, layouts: Layouts) -> GroupStorage:
    """Take over the weights of the layers, all of one kind; e4m3 weights in this many layouts."""
    if isinstance(bases[0], NF4Linear):
        return DequantizedMatrix(bases, shape)
    if layouts == 2 and isinstance(bases[0], FP8Linear):
        return TwoLayoutMatrix(bases, shape)
    return ResidentMatrix(bases, shape)
