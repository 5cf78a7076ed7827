"""Convert NF4 to e4m3 in one pass, reading half a byte and writing one byte per value.

Frozen weights stay in four bits while their matmuls run on the fp8 tensor cores: the e4m3 matrix is written just before
the matmul and dropped after it. For the backward pass it is written transposed directly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.e4m3 import row_scale
from pantheraml.kernels.nf4.format import BLOCK, CHUNK, BlockScales, NF4Weight
from pantheraml.kernels.nf4.to_fp8.reference import reference_nf4_to_fp8


def nf4_to_fp8(weight: NF4Weight, row_scales: Tensor, out: Tensor) -> None:
    """Write `weight` divided by its row scales to `out` [rows, columns], a slice of an e4m3 matrix or of its transpose.

    `row_scales` [rows] come from `nf4_row_scales`. Columns must be a multiple of 64, so that no block spans two rows.
    """
    if weight.shape[1] % BLOCK or 1 not in out.stride():
        raise ValueError(f"cannot write NF4 {tuple(weight.shape)} to {tuple(out.shape)} with strides {out.stride()}")
    if not runs_triton(out):
        reference_nf4_to_fp8(weight, row_scales, out)
        return
    from pantheraml.kernels.nf4.to_fp8 import triton_kernel

    triton_kernel.nf4_to_fp8(weight, row_scales, out)


def nf4_row_scales(weight: NF4Weight) -> Tensor:
    """e4m3 scale of each row, [rows] float32. Computed once per weight, so in plain torch, chunk by chunk."""
    rows, columns = weight.shape
    magnitudes, rows_per_chunk = weight.scales.values(), max(1, CHUNK // columns)
    scales = []
    for start in range(0, rows, rows_per_chunk):
        stop = min(start + rows_per_chunk, rows)
        blocks = slice(start * columns // BLOCK, stop * columns // BLOCK)
        codes = weight.qdata[start * columns // 2 : stop * columns // 2]
        chunk = NF4Weight(codes, BlockScales(magnitudes[blocks]), torch.Size((stop - start, columns)))
        scales.append(row_scale(chunk.dequantize(torch.float32)))
    return torch.cat(scales)
