"""Where the matrix of a group of layers comes from.

Both directions of a group's product read one matrix: the frozen weights of its layers below each other, to the right
columns for every adapter's B, and below rows for every adapter's A. Weights in bf16 and e4m3 are kept in that form.
The tensor cores read e4m3 along the inner dimension only, so the way back needs the bytes transposed: it does that just
before the product, or, where memory is not short, both layouts are kept. Weights in nf4 are not kept in that form:
their matrix would take twice their memory, so each direction builds its own, just before the product, and nothing of it
outlives the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, LIMIT, shared_scale, to_e4m3
from pantheraml.kernels.fp8_product import transposed
from pantheraml.kernels.nf4_fill import nf4_fill, nf4_row_scales
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.models.quantise.nf4 import NF4Linear
from pantheraml.specs.plan import Layouts


class Extent(NamedTuple):
    """Of a group's matrix: the weights' corner [height, width], `ranks` used columns and rows of `room` beside it."""

    height: int
    width: int
    ranks: int
    room: int


class Storage(Protocol):
    @property
    def scales(self) -> Tensor | None:
        """[height], of the weights' rows; None: the matrix is not quantised."""
        ...

    up: Tensor
    """[height, ranks]: where every adapter's B is written, scaled."""
    down: Tensor
    """[ranks, width]: where every adapter's A is written."""

    @property
    def turned_down(self) -> Tensor | None:
        """[width, ranks]: where A is written as well, transposed; None: nowhere."""
        ...

    def forward_matrix(self) -> Tensor:
        """[height, width + room]: weights and B."""
        ...

    def backward_matrix(self) -> Tensor:
        """[width, height + room]: weights over A, transposed."""
        ...


class KeptMatrix:
    """Plain or e4m3 weights, which become views of one matrix."""

    def __init__(self, bases: Sequence[Any], extent: Extent) -> None:
        """`bases` are all `nn.Linear` or all `FP8Linear`."""
        height, width, ranks, room = extent
        self._matrix = _zeros_like(bases[0], height + room, width + room)
        self._height, self._width = height, width
        self.up = self._matrix[:height, width : width + ranks]
        self.down = self._matrix[height : height + ranks, :width]
        self.turned_down = None
        self.scales = _take(bases, self._matrix[:height, :width])

    def forward_matrix(self) -> Tensor:
        return self._matrix[: self._height]

    def backward_matrix(self) -> Tensor:
        matrix = self._matrix[:, : self._width]
        return matrix.T if self.scales is None else transposed(matrix)


class KeptTwice:
    """E4m3 weights, which become views of one matrix; the matrix of the way back is kept as well, so that no pass has
    to transpose it. Nothing but memory changes: its bytes are those that `KeptMatrix` makes anew.
    Whoever writes to a weight through `.data`, which raises no version, has to call `turn_weights`."""

    def __init__(self, bases: Sequence[Any], extent: Extent) -> None:
        """`bases` are all `FP8Linear`."""
        height, width, ranks, room = extent
        self.first = _zeros_like(bases[0], height, width + room)
        self.second = _zeros_like(bases[0], width, height + room)
        self._height, self._width = height, width
        self.up = self.first[:, width : width + ranks]
        self.down = _zeros_like(bases[0], ranks, width)
        self.turned_down = self.second[:, height : height + ranks]
        self.scales = _take(bases, self.first[:, :width])
        self.turn_weights()

    def turn_weights(self) -> None:
        """Bring the second matrix's weights into step with the first's."""
        self.second[:, : self._height] = transposed(self.first[:, : self._width])

    def forward_matrix(self) -> Tensor:
        return self.first

    def backward_matrix(self) -> Tensor:
        return self.second


def _zeros_like(base: Any, rows: int, columns: int) -> Tensor:
    like: Tensor = base.qweight if isinstance(base, FP8Linear) else base.weight
    return torch.zeros(rows, columns, dtype=like.dtype, device=like.device)


def _take(bases: Sequence[Any], weights: Tensor) -> Tensor | None:
    """Move the layers' weights below each other into `weights`, of which they become views; the scales of its rows, if
    they have any."""
    quantised = isinstance(bases[0], FP8Linear)
    scales = torch.empty(len(weights), dtype=torch.float32, device=weights.device) if quantised else None
    shared = _common_scale(bases) if quantised else None
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
            else:  # by powers of two: only exponents change
                view.copy_(to_e4m3(base.qweight.float() * (base.scale[0] / shared)))
            scales[rows] = base.scale if shared is None else shared
            base.qweight, base.scale = view, scales[rows]
        start = rows.stop
    return scales


def _common_scale(bases: Sequence[Any]) -> Tensor | None:
    """The largest of the layers' scales, if each layer has one and they differ by powers of two."""
    if not all(base.shared_scale for base in bases):
        return None
    scales = torch.stack([base.scale[0] for base in bases])
    ratios = torch.log2(scales / scales.amax())
    return scales.amax() if bool((ratios == ratios.round()).all()) else None


class RebuiltMatrix:
    """NF4 weights, which stay where they are; each direction's matrix is built in e4m3 when it is asked for."""

    def __init__(self, bases: Sequence[Any], extent: Extent) -> None:
        """`bases` are all `NF4Linear`."""
        self._bases, self._extent = bases, extent
        device = bases[0].qweight.device
        self.scales = torch.cat([nf4_row_scales(base.packed()) for base in bases])
        shared = shared_scale(self.scales * LIMIT)
        if shared is not None:
            self.scales.copy_(shared)
        self.up = torch.zeros(extent.height, extent.ranks, dtype=E4M3, device=device)
        self.down = torch.zeros(extent.ranks, extent.width, dtype=E4M3, device=device)
        self.turned_down = None

    def forward_matrix(self) -> Tensor:
        height, width, *_ = self._extent
        matrix = self._empty(height, width)
        self._fill(matrix[:, :width])
        return self._with_adapters(matrix, width, self.up)

    def backward_matrix(self) -> Tensor:
        height, width, *_ = self._extent
        matrix = self._empty(width, height)
        self._fill(matrix[:, :height].T)
        return self._with_adapters(matrix, height, self.down.T)

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns + self._extent.room, dtype=E4M3, device=self.up.device)

    def _fill(self, weights: Tensor) -> None:
        start = 0
        for base in self._bases:
            rows = slice(start, start + base.out_features)
            nf4_fill(base.packed(), self.scales[rows], weights[rows])
            start = rows.stop

    def _with_adapters(self, matrix: Tensor, column: int, adapters: Tensor) -> Tensor:
        end = column + self._extent.ranks
        matrix[:, column:end] = adapters
        # Bytes that nobody wrote may be NaN, and the zeros that they meet in the product would not undo that.
        matrix[:, end:].view(torch.uint8).zero_()
        return matrix


def store(bases: Sequence[Any], extent: Extent, layouts: Layouts) -> Storage:
    """The layers' weights, all of one kind, taken over as that kind is best kept; e4m3 in this many layouts."""
    if isinstance(bases[0], NF4Linear):
        return RebuiltMatrix(bases, extent)
    if layouts == 2 and isinstance(bases[0], FP8Linear):
        return KeptTwice(bases, extent)
    return KeptMatrix(bases, extent)
