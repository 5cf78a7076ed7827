"""fp8 matmul on the tensor cores, and the byte transpose that lets one weight serve forward and backward.

The tensor cores require both operands of an fp8 matmul to be contiguous along the inner dimension. The forward pass
reads a weight [out, in] along `in`, the backward pass along `out`. Instead of keeping a second copy (6.5 GiB for
Llama-3.1-8B), the backward pass transposes the bytes just before use, which costs about 2 % of a step.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pantheraml.base.env import set_native_default
from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8.matmul.reference import reference_fp8_matmul, reference_transpose


def fp8_matmul(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    long_sum: bool = False,
) -> Tensor:
    """Compute left [m, k] @ right [n, k].T. Both are e4m3 (left may be e5m2); scales are per row, [m] and [n] (None:
    ones).

    With `out`, the result is written there in `out`'s dtype. `long_sum` disables fast accumulation, for correlated sums
    over a very long inner dimension: Hopper's tensor cores keep about 14 bits of an accumulator, and small terms are
    lost. Over a vocabulary of 128,256 the gradient of hidden states was 11 to 13 % off, and its mean over tokens
    several times its own size; with periodic promotion to float32 it is 0.2 % off, in 8 to 18 % more time (H200).
    """
    if not left.is_cuda:
        result = reference_fp8_matmul(left, left_scales, right, right_scales)
    else:
        _disable_cublaslt_workspace()
        direct = out if out is not None and out.dtype == torch.bfloat16 else None
        result = torch._scaled_mm(
            left, right.T,
            scale_a=left_scales[:, None],
            scale_b=(_ones(right.shape[0], right.device) if right_scales is None else right_scales)[None],
            out_dtype=torch.bfloat16, use_fast_accum=not long_sum, out=direct,
        )  # fmt: skip
    if out is None:
        return result.to(dtype)
    return out if result is out else out.copy_(result)


def transposed(source: Tensor) -> Tensor:
    """Contiguous transpose of an e4m3 matrix with any row stride."""
    if not runs_triton(source):
        return reference_transpose(source)
    from pantheraml.kernels.fp8.matmul import triton_kernel

    if not triton_kernel.is_word_aligned(source):
        return reference_transpose(source)
    out = torch.empty(source.shape[1], source.shape[0], dtype=source.dtype, device=source.device)
    triton_kernel.transpose(source, out)
    return out


@functools.cache
def _disable_cublaslt_workspace() -> None:
    """Make cuBLASLt schedule tiles statically by giving it no workspace.

    With a workspace it keeps a tile counter there and clears it before each matmul, which idles the GPU for about 4 us
    (H200; 271 matmuls in a step of an 8B model). The setting affects every cuBLASLt matmul in this process, including
    linear layers with a bias, and must not be undone: torch reads the size on every call and fails if it changes.
    """
    set_native_default("CUBLASLT_WORKSPACE_SIZE", "0")


@functools.lru_cache(maxsize=64)
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float32, device=device)
