"""Torch references of the LoRA-column ops, also used on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3_MAX, to_e4m3
from pantheraml.kernels.lora_columns.grad_operands import GradMatmul

PRESCALE = 2.0**100
"""Factor of a left operand whose right operand is e4m3: the kernel reads e4m3 values times 2**-120 as bf16."""


def reference_write(
    down: Tensor,
    up: Tensor,
    scaling: float,
    matrix_up: Tensor,
    matrix_down: Tensor,
    scales: Tensor | None,
    factor_up: Tensor,
    scale_down: Tensor,
    scale_up: Tensor,
) -> None:
    if scales is None:
        matrix_up.copy_(up.float() * scaling)
        matrix_down.copy_(down)
    else:
        scaled = up.float() * (scaling / scales)[:, None]
        scale_up.copy_(scaled.abs().amax(dim=0).clamp(min=1e-30) / E4M3_MAX)
        scale_down.copy_(down.float().abs().amax(dim=1).clamp(min=1e-30) / E4M3_MAX)
        matrix_up.copy_(to_e4m3(scaled * (1 / scale_up)))
        matrix_down.copy_(to_e4m3(down.float() * (1 / scale_down)[:, None]))
    factor_up.copy_(matrix_up.T)


def reference_project(qdata: Tensor, factor: Tensor, segments: Tensor, out: Tensor) -> None:
    out.zero_()
    for start, width, column, rank in segments.tolist():
        columns = slice(start, start + width)
        out[0, :, column : column + rank] = qdata[:, columns].float() @ factor[:rank, columns].float().T


def reference_place(
    raw: Tensor,
    factor_scales: Tensor,
    matrix_scales: Tensor,
    qdata: Tensor,
    width: int,
    scales: Tensor | None,
    lora_mid: Tensor,
) -> None:
    total = raw.sum(dim=0)
    ranks = total.shape[1]
    qdata[:, width:] = torch.zeros((), dtype=qdata.dtype)
    if scales is None:
        lora_mid.copy_(total)
        qdata[:, width : width + ranks] = total.to(qdata.dtype)
        return
    total = total * factor_scales[:ranks]
    lora_mid.copy_(total * scales[:, None])
    values = total * matrix_scales[:ranks]
    excess = values.abs().amax(dim=1) / E4M3_MAX
    rescale = torch.where(excess > 1, torch.exp2(excess.clamp(min=1e-30).log2().ceil()), 1.0)
    qdata[:, :width] = to_e4m3(qdata[:, :width].float() / rescale[:, None])
    qdata[:, width : width + ranks] = to_e4m3(values / rescale[:, None])
    scales.mul_(rescale)


def reference_left_operand(lora_mid: Tensor, row_scales: Tensor | None, out: Tensor) -> None:
    """Write the first columns of `out` [ranks, padded rows]; the padding is left uninitialized."""
    rows = lora_mid.shape[0]
    out[:, :rows] = lora_mid.T if row_scales is None else lora_mid.T.float() * (row_scales * PRESCALE)


def reference_gradient(matmul: GradMatmul) -> None:
    """Compute `matmul.out`. A prescaled left operand already includes the row scales."""
    left = matmul.left.rows[:, : matmul.qdata.shape[0]].float()
    if matmul.left.prescaled:
        left = left / PRESCALE
    elif matmul.row_scales is not None:
        left = left * matmul.row_scales
    for start, end, column, rank in matmul.blocks.tolist():
        total = left[column : column + rank] @ matmul.qdata[:, start:end].float()
        matmul.out[:rank, start:end] = total if matmul.divisors is None else total / matmul.divisors[start:end]
