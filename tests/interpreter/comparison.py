"""Comparisons of kernel results with their references."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 1e-6
"""A few ulps of float32: different summation order, or another library's exp or rsqrt."""


def assert_close(ours: Tensor, theirs: Tensor, *, tolerance: float = ULPS) -> None:
    """Compare float32 tensors within `tolerance` times the row's amax."""
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.shape == theirs.shape
    allowed = tolerance * theirs.abs().amax(dim=-1, keepdim=True)
    excess = ((ours - theirs).abs() - allowed).max()
    assert excess <= 0, f"off by {float(excess)} more than allowed"


def assert_same_rows(ours: Tensor, scales: Tensor, theirs: Tensor, their_scales: Tensor) -> None:
    """Compare e4m3 rows and their scales. An ulp decides between two codes at a rounding boundary, so 1 % of the codes
    may be off by one."""
    torch.testing.assert_close(scales, their_scales, rtol=ULPS, atol=0)
    assert_same_codes(ours, theirs)


def assert_same_codes(ours: Tensor, theirs: Tensor) -> None:
    distance = (_ordered(ours) - _ordered(theirs)).abs()
    assert distance.max() <= 1, f"codes are {int(distance.max())} apart"
    assert (distance > 0).float().mean() <= 0.01, f"{int((distance > 0).sum())} of {distance.numel()} codes differ"


def _ordered(qdata: Tensor) -> Tensor:
    """Map fp8 values to integers in the order of their values, adjacent values one apart."""
    assert qdata.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    codes = qdata.view(torch.uint8).int()
    assert qdata.float().isfinite().all()
    return torch.where(codes < 0x80, codes, 0x80 - codes)
