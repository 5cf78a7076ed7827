"""Calibrated NF4 rounding: choose codes that minimize the error of a layer's matmuls instead of its weights.

Round-to-nearest minimizes the weight error D. Training sees two matmuls of a layer: its outputs, from inputs x, and its
input gradients, from output gradients g. They change by x D^T and g D, so over calibration text the squared errors are
tr(D X D^T) and tr(D^T G D), with X = E[x x^T] and G = E[g g^T]. Both matter about equally, so the sum of the two, each
normalized by its mean, is minimized: less important weights compensate for the rounding of others.

The method is coordinate descent (`kernels.nf4.descent`): each weight in turn takes the value that minimizes the sum
with all others fixed. On a small Llama (`benchmarks/accuracy.py`, size cpu) it reduces the error of the adapters'
gradients to about a third; using the inputs alone, as GPTQ does (arXiv 2210.17323), to about a half.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pantheraml.kernels.nf4.descent import TILE, effective_weight, nf4_descent
from pantheraml.kernels.nf4.format import BLOCK, NF4Weight, blocks_of, levels_on, nearest_codes, storable_scales

SWEEPS = 8
SCALE_CANDIDATES = tuple(1 - step / 40 for step in range(13))
"""Candidate block scales, as fractions of the block's absmax."""
DAMPING = 0.1
"""Added to the diagonal, relative to its mean. On held-out text, 0.1 is 2 % better than 0.01 (65,536 tokens for 512
inputs), and the gain grows with less text."""


def round_nf4(weight: Tensor, inputs: Tensor, gradients: Tensor, *, sweeps: int = SWEEPS) -> NF4Weight:
    """Quantize `weight` (out_features, in_features) to nf4; `inputs` and `gradients` are X and G, as sums or means.

    Block scales are in bitsandbytes' double-quantized form.
    """
    blocks = blocks_of(weight.detach().flatten().float(), BLOCK)
    scales = storable_scales(_block_scales(blocks))
    codes = nearest_codes(blocks, scales.values()).flatten()[: weight.numel()].view(weight.shape)
    nearest = NF4Weight.from_codes(codes, scales)
    descent = _Descent(weight, nearest, _normalize_moments(inputs), _normalize_moments(gradients))
    for _ in range(sweeps):
        if not descent.sweep():
            break
    return NF4Weight.from_codes(descent.codes(), scales)


def rounding_error(values: Tensor, weight: Tensor, inputs: Tensor, gradients: Tensor) -> float:
    """Return the objective that `round_nf4` minimizes, for `values` in place of `weight`."""
    change = values.float() - weight.float()
    forward, backward = change @ _normalize_moments(inputs), _normalize_moments(gradients) @ change
    return float(((forward + backward) * change).sum())


def _block_scales(blocks: Tensor) -> Tensor:
    """Return each block's scale with the least error: usually a little below its absmax, which is then clipped."""
    largest = blocks.abs().amax(dim=1)
    levels = levels_on(blocks.device)
    best, least = largest, torch.full_like(largest, torch.inf)
    for fraction in SCALE_CANDIDATES:
        candidates = fraction * largest
        values = levels[nearest_codes(blocks, candidates).int()] * candidates[:, None]
        error = (effective_weight(values) - blocks).square().sum(dim=1)
        best, least = torch.where(error < least, candidates, best), torch.minimum(error, least)
    return best


def _normalize_moments(moments: Tensor) -> Tensor:
    """Scale to a mean diagonal of 1, and damp."""
    moments = moments.float()
    mean = moments.diagonal().mean()
    if mean > 0:
        moments = moments / mean
    return moments + DAMPING * torch.eye(len(moments), device=moments.device)


class _Descent:
    """Coordinate descent over a weight in tiles, zero-padded to whole tiles (padding never moves).

    A weight that is wider than tall is transposed, and its moments swapped. In each step every column of tiles then
    moves one tile, in consecutive rows, so that most of what the slopes need is read contiguously.
    """

    def __init__(self, weight: Tensor, start: NF4Weight, inputs: Tensor, gradients: Tensor) -> None:
        self._shape = weight.shape
        self._transposed = weight.shape[0] < weight.shape[1]
        if self._transposed:
            inputs, gradients = gradients, inputs
        self._target, self._scales, self._codes = map(
            self._to_tiles, (weight.float(), start.magnitudes(), start.codes())
        )
        self._rows, self._columns = (size // TILE for size in self._target.shape)
        self._inputs, self._gradients = (_padded(moments, diagonal=1.0) for moments in (inputs, gradients))
        self._input_tiles = _diagonal_tiles(self._inputs)
        # Rows of tiles, wrapped around, so that the rows moved in one step are always contiguous.
        wrapped = torch.arange(self._rows + self._columns, device=weight.device) % self._rows
        self._gradient_rows = self._gradients.view(self._rows, TILE, -1)[wrapped]
        self._gradient_tiles = _diagonal_tiles(self._gradients)[wrapped]
        self._levels = levels_on(weight.device)

    def _to_tiles(self, part: Tensor) -> Tensor:
        return _padded(part.T if self._transposed else part)

    def codes(self) -> Tensor:
        codes = self._codes.T if self._transposed else self._codes
        rows, columns = self._shape
        return codes[:rows, :columns].contiguous()

    def sweep(self) -> bool:
        """Update every weight once; return whether any changed."""
        change = self._values(self._codes, self._scales) - self._target
        slope = change @ self._inputs + self._gradients @ change
        moved = torch.zeros((), dtype=torch.bool, device=slope.device)
        for first in range(self._rows):
            moved |= self._move(slope, first)
        return bool(moved)

    def _values(self, codes: Tensor, scales: Tensor) -> Tensor:
        return effective_weight(self._levels[codes.int()] * scales)

    def _move(self, slope: Tensor, first: int) -> Tensor:
        """Update one tile per column of tiles, starting at tile row `first`, and `slope` with it; return whether any
        changed."""
        columns = torch.arange(self._columns, device=slope.device)
        rows = (columns + first) % self._rows
        window = slice(first, first + self._columns)
        inputs, gradients = self._input_tiles, self._gradient_tiles[window]
        curvature = inputs.diagonal(dim1=1, dim2=2)[:, None, :] + gradients.diagonal(dim1=1, dim2=2)[:, :, None]
        old, scales = _tiles(self._codes)[rows, columns], _tiles(self._scales)[rows, columns]
        new = nf4_descent(old, _tiles(slope)[rows, columns], scales, curvature, inputs, gradients)
        _tiles(self._codes)[rows, columns] = new
        change = self._values(new, scales) - self._values(old, scales)
        slope.view(self._rows, TILE, -1).index_add_(0, rows, change @ self._inputs.view(self._columns, TILE, -1))
        slope.view(-1, self._columns, TILE).transpose(0, 1).baddbmm_(self._gradient_rows[window].mT, change)
        return change.any()


def _padded(matrix: Tensor, diagonal: float = 0.0) -> Tensor:
    """Pad to whole tiles with zeros, or with `diagonal` on the diagonal."""
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % TILE, 0, -rows % TILE)).contiguous()
    padded.diagonal()[min(rows, columns) :] = diagonal
    return padded


def _tiles(matrix: Tensor) -> Tensor:
    """A view [rows of tiles, columns of tiles, TILE, TILE]."""
    rows, columns = matrix.shape
    return matrix.view(rows // TILE, TILE, columns // TILE, TILE).transpose(1, 2)


def _diagonal_tiles(matrix: Tensor) -> Tensor:
    index = torch.arange(len(matrix) // TILE, device=matrix.device)
    return _tiles(matrix)[index, index]
