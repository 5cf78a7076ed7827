"""Products of e4m3 matrices on the tensor cores, and the transposition that lets one weight serve both directions.

The tensor cores want either side of an fp8 product laid out along the inner dimension. The forward pass reads a weight
[out, in] along `in`, the backward pass along `out`. Instead of a second copy in memory (6.5 GiB for Llama-3.1-8B) the
backward pass transposes the bytes just before it needs them, which costs about 2 % of a step; whoever has the memory
keeps both.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pantheraml.base.env import suggest_to_native_code
from pantheraml.kernels.dispatch import runs_triton
from pantheraml.kernels.fp8_product.reference import reference_product, reference_transpose


def fp8_product(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,
    *,
    long_sum: bool = False,
) -> Tensor:
    """left [m, k] times right [n, k] transposed, both e4m3 (left may be e5m2); scales are per row, [m] and [n] (None:
    ones).

    With `out` the result is written there, in the dtype of that. `long_sum` is for sums of very many terms with
    something in common: Hopper's tensor cores keep about 14 bits of a sum, and small terms get lost in it. Over a
    vocabulary of 128,256 the gradient of hidden states was 11 to 13 % off, and its mean over tokens several times its
    own size; with sums carried on in float32 now and then it is 0.2 % off, in 8 to 18 % more time (H200).
    """
    if not left.is_cuda:
        product = reference_product(left, left_scales, right, right_scales)
    else:
        _do_without_workspace()
        direct = out if out is not None and out.dtype == torch.bfloat16 else None
        product = torch._scaled_mm(
            left, right.T,
            scale_a=left_scales[:, None],
            scale_b=(_ones(right.shape[0], right.device) if right_scales is None else right_scales)[None],
            out_dtype=torch.bfloat16, use_fast_accum=not long_sum, out=direct,
        )  # fmt: skip
    if out is None:
        return product.to(dtype)
    return out if product is out else out.copy_(product)


def transposed(source: Tensor) -> Tensor:
    """A contiguous transposition of an e4m3 matrix (any row stride)."""
    if not runs_triton(source):
        return reference_transpose(source)
    from pantheraml.kernels.fp8_product import triton_kernel

    if not triton_kernel.in_words(source):
        return reference_transpose(source)
    out = torch.empty(source.shape[1], source.shape[0], dtype=source.dtype, device=source.device)
    triton_kernel.transpose(source, out)
    return out


@functools.cache
def _do_without_workspace() -> None:
    """Have cuBLASLt divide a product among the processors beforehand. With a workspace it keeps a counter there, which
    it sets to nought before each product, and for some 4 us the GPU does nothing else (H200; there are 271 products in
    a step of an 8B model). It holds for all products through cuBLASLt in this process (linear layers with a bias are
    such), and must stay: torch asks for the size each time, and would be at a loss if there were a workspace again."""
    suggest_to_native_code("CUBLASLT_WORKSPACE_SIZE", "0")


@functools.lru_cache(maxsize=64)
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float32, device=device)
