"""AdamW step, in place and without allocations; defined by `reference.py`."""

from __future__ import annotations

from torch import Tensor

from pantheraml.kernels.adamw.reference import AdamWStep, Moments8bit, reference_adamw8bit_, reference_adamw_
from pantheraml.kernels.dispatch import runs_triton


def adamw_(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: AdamWStep) -> None:
    """Apply one step. All tensors are contiguous; parameter and moments are float32 or bf16, the gradient any float."""
    if runs_triton(parameter):
        from pantheraml.kernels.adamw import triton_kernel

        triton_kernel.step(parameter, gradient, first, second, step)
    else:
        reference_adamw_(parameter, gradient, first, second, step)


def adamw8bit_(parameter: Tensor, gradient: Tensor, moments: Moments8bit, step: AdamWStep) -> None:
    """Apply one step with 8-bit moments."""
    if runs_triton(parameter):
        from pantheraml.kernels.adamw import triton_kernel

        triton_kernel.step_8bit(parameter, gradient, moments, step)
    else:
        reference_adamw8bit_(parameter, gradient, moments, step)
