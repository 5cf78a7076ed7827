"""Which of nf4's values each weight is rounded to, so that a layer's products change least.

Rounding each weight to the nearest value changes the weight least. What training sees of a layer is two products: its
outputs, of its inputs x, and the gradient of its inputs, of the gradients g of its outputs. With D for what rounding
adds to the weight, they change by x D^T and g D, and over the text that x and g come from the squares of that are
tr(D X D^T) and tr(D^T G D), with X = E[x x^T] and G = E[g g^T]. Both are about equally important, so the sum of the
two, each by its own mean, is made small: weights that matter little take up what rounding the others did.

This is coordinate descent (`kernels.nf4_descent`): one weight after the other takes the value that makes the sum least
while all others stay. On a small Llama (`benchmarks/accuracy.py`, size cpu) that reduces what rounding changes of the
adapters' gradients to about a third; following the inputs alone, as GPTQ does (arXiv 2210.17323), to about a half.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pantheraml.kernels.nf4 import BLOCK, NF4Weight, blocks_of, levels_on, nearest_codes, storable_scales
from pantheraml.kernels.nf4_descent import TILE, as_multiplied, descend

SWEEPS = 8
SHARES = tuple(1 - step / 40 for step in range(13))
"""Of a block's largest value, that its magnitude may be."""
DAMPING = 0.1
"""Of the mean: what directions count at least. Over text that was not used, a tenth is 2 % better than a hundredth
(65,536 tokens for 512 inputs), and the more so the less text there is."""


def round_nf4(weight: Tensor, inputs: Tensor, gradients: Tensor, *, sweeps: int = SWEEPS) -> NF4Weight:
    """`weight` (out_features, in_features) in nf4; `inputs` and `gradients` are X and G, as sums or means.

    Magnitudes are kept in the form that bitsandbytes stores.
    """
    blocks = blocks_of(weight.detach().flatten().float(), BLOCK)
    scales = storable_scales(_magnitudes(blocks))
    codes = nearest_codes(blocks, scales.values()).flatten()[: weight.numel()].view(weight.shape)
    nearest = NF4Weight.of_codes(codes, scales)
    descent = _Descent(weight, nearest, _per_mean(inputs), _per_mean(gradients))
    for _ in range(sweeps):
        if not descent.sweep():
            break
    return NF4Weight.of_codes(descent.codes(), scales)


def products_changed(values: Tensor, weight: Tensor, inputs: Tensor, gradients: Tensor) -> float:
    """The sum that rounding makes small, for `values` in the place of the weight."""
    change = values.float() - weight.float()
    forth, back = change @ _per_mean(inputs), _per_mean(gradients) @ change
    return float(((forth + back) * change).sum())


def _magnitudes(blocks: Tensor) -> Tensor:
    """Of each block the one that changes it least: a little less than its largest value, as a rule, which is then cut
    for the good of all others."""
    largest = blocks.abs().amax(dim=1)
    levels = levels_on(blocks.device)
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in SHARES:
        magnitudes = share * largest
        values = levels[nearest_codes(blocks, magnitudes).int()] * magnitudes[:, None]
        error = (as_multiplied(values) - blocks).square().sum(dim=1)
        best, least = torch.where(error < least, magnitudes, best), torch.minimum(error, least)
    return best


def _per_mean(moments: Tensor) -> Tensor:
    """Of mean 1 along the diagonal, damped."""
    moments = moments.float()
    mean = moments.diagonal().mean()
    if mean > 0:
        moments = moments / mean
    return moments + DAMPING * torch.eye(len(moments), device=moments.device)


class _Descent:
    """A weight as tiles. It is filled up with blocks of nought to whole ones, and those never move.

    A weight that is wider than it is high is turned over, and its moments change places. So in each turn every column
    of tiles moves one, in rows that follow each other, and most of what the slopes need is read where it lies.
    """

    def __init__(self, weight: Tensor, start: NF4Weight, inputs: Tensor, gradients: Tensor) -> None:
        self._shape = weight.shape
        self._is_turned = weight.shape[0] < weight.shape[1]
        if self._is_turned:
            inputs, gradients = gradients, inputs
        self._target, self._scales, self._codes = map(self._own, (weight.float(), start.magnitudes(), start.codes()))
        self._rows, self._columns = (size // TILE for size in self._target.shape)
        self._inputs, self._gradients = (_padded(moments, diagonal=1.0) for moments in (inputs, gradients))
        self._input_tiles = _diagonal_tiles(self._inputs)
        # rows of tiles, and the first ones again: as many as move in a turn then always follow each other
        again = torch.arange(self._rows + self._columns, device=weight.device) % self._rows
        self._gradient_rows = self._gradients.view(self._rows, TILE, -1)[again]
        self._gradient_tiles = _diagonal_tiles(self._gradients)[again]
        self._levels = levels_on(weight.device)

    def _own(self, part: Tensor) -> Tensor:
        return _padded(part.T if self._is_turned else part)

    def codes(self) -> Tensor:
        codes = self._codes.T if self._is_turned else self._codes
        rows, columns = self._shape
        return codes[:rows, :columns].contiguous()

    def sweep(self) -> bool:
        """Every weight once; whether any moved."""
        change = self._values(self._codes, self._scales) - self._target
        slope = change @ self._inputs + self._gradients @ change
        moved = torch.zeros((), dtype=torch.bool, device=slope.device)
        for first in range(self._rows):
            moved |= self._move(slope, first)
        return bool(moved)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return as_multiplied(self._levels[codes.int()] * scales)

    def _move(self, slope: Tensor, first: int) -> Tensor:
        """The weights of one tile of each column, from the `first` row of tiles on; whether any moved. `slope` is kept
        what it stands for."""
        columns = torch.arange(self._columns, device=slope.device)
        rows = (columns + first) % self._rows
        here = slice(first, first + self._columns)
        inputs, gradients = self._input_tiles, self._gradient_tiles[here]
        curvature = inputs.diagonal(dim1=1, dim2=2)[:, None, :] + gradients.diagonal(dim1=1, dim2=2)[:, :, None]
        old, scales = _tiles(self._codes)[rows, columns], _tiles(self._scales)[rows, columns]
        new = descend(old, _tiles(slope)[rows, columns], scales, curvature, inputs, gradients)
        _tiles(self._codes)[rows, columns] = new
        change = self._values(new, scales) - self._values(old, scales)
        slope.view(self._rows, TILE, -1).index_add_(0, rows, change @ self._inputs.view(self._columns, TILE, -1))
        slope.view(-1, self._columns, TILE).transpose(0, 1).baddbmm_(self._gradient_rows[here].mT, change)
        return change.any()


def _padded(matrix: Tensor, diagonal: float = 0.0) -> Tensor:
    """Filled up with zeros to whole tiles, or with these on the diagonal."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % TILE, 0, -rows % TILE)).contiguous()
    padded.diagonal()[min(rows, columns) :] = diagonal
    return padded


def _tiles(matrix: Tensor) -> Tensor:
    """A view [rows of tiles, columns of tiles, TILE, TILE]."""
    rows, columns = matrix.shape
    return matrix.view(rows // TILE, TILE, columns // TILE, TILE).transpose(1, 2)


def _diagonal_tiles(matrix: Tensor) -> Tensor:
    every = torch.arange(len(matrix) // TILE, device=matrix.device)
    return _tiles(matrix)[every, every]
