"""How results of kernels are compared with their references."""

from __future__ import annotations

import torch
from torch import Tensor

ULPS = 1e-6
"""A few last places of float32: sums in another order, another library's exp or rsqrt."""


def assert_close(ours: Tensor, theirs: Tensor, *, tolerance: float = ULPS) -> None:
    """Float32, within `tolerance` of the largest magnitude of the row."""
    assert ours.dtype == theirs.dtype == torch.float32
    assert ours.shape == theirs.shape
    room = tolerance * theirs.abs().amax(dim=-1, keepdim=True)
    worst = ((ours - theirs).abs() - room).max()
    assert worst <= 0, f"off by {float(worst)} more than allowed"


def assert_same_rows(ours: Tensor, scales: Tensor, theirs: Tensor, their_scales: Tensor) -> None:
    """E4m3 rows and their scales: where a value lies on the border of two codes a last place decides, so one code in a
    hundred may be the next one."""
    torch.testing.assert_close(scales, their_scales, rtol=ULPS, atol=0)
    assert_same_codes(ours, theirs)


def assert_same_codes(ours: Tensor, theirs: Tensor) -> None:
    apart = (_ordered(ours) - _ordered(theirs)).abs()
    assert apart.max() <= 1, f"codes are {int(apart.max())} apart"
    assert (apart > 0).float().mean() <= 0.01, f"{int((apart > 0).sum())} of {apart.numel()} codes differ"


def _ordered(payload: Tensor) -> Tensor:
    """Fp8 values as integers in the order of what they stand for, neighbours one apart."""
    assert payload.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    codes = payload.view(torch.uint8).int()
    assert payload.float().isfinite().all()
    return torch.where(codes < 0x80, codes, 0x80 - codes)
