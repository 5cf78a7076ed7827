"""From nf4 to e4m3 in one pass: half a byte read and one written for each value, nothing in between.

So frozen weights can stay in four bits and their products still run on the fp8 tensor cores: the matrix of a product
is filled just before it, and dropped after it. The way back needs the transposed matrix; it is filled as such, rather
than transposed afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.e4m3 import row_scale
from pantheraml.kernels.nf4 import BLOCK, PIECE, BlockScales, NF4Weight
from pantheraml.kernels.nf4_fill.reference import reference_fill


def nf4_fill(weight: NF4Weight, row_scales: Tensor, out: Tensor) -> None:
    """Each row of `weight` over its scale, into `out` [rows, columns] e4m3: a part of a matrix, or of a transposed one.

    `row_scales` [rows] are those of `nf4_row_scales`. Columns are a multiple of 64, so that no block spans two rows.
    """
    if weight.shape[1] % BLOCK or 1 not in out.stride():
        raise ValueError(f"cannot fill {tuple(out.shape)} with strides {out.stride()} from nf4 {tuple(weight.shape)}")
    if not runs_triton(out):
        reference_fill(weight, row_scales, out)
        return
    from pantheraml.kernels.nf4_fill import triton_kernel

    triton_kernel.fill(weight, row_scales, out)


def nf4_row_scales(weight: NF4Weight) -> Tensor:
    """[rows] float32: the e4m3 scale of each row. For once and for all, so in plain torch, a piece at a time."""
    rows, columns = weight.shape
    magnitudes, step = weight.scales.values(), max(1, PIECE // columns)
    found = []
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        blocks = slice(start * columns // BLOCK, stop * columns // BLOCK)
        codes = weight.payload[start * columns // 2 : stop * columns // 2]
        piece = NF4Weight(codes, BlockScales(magnitudes[blocks]), torch.Size((stop - start, columns)))
        found.append(row_scale(piece.dequantise(torch.float32)))
    return torch.cat(found)
