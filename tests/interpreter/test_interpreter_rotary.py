from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.rotary import reference_rotate, rotate, unrotate
from tests.interpreter.comparison import assert_close

TOKENS = 5
SHAPES = [((4, 2, 2), 16), ((9, 3, 3), 24)]
"""Heads and their size: those of one program, and more, of a size that is no power of two."""


def angles(size: int) -> tuple[Tensor, Tensor]:
    turns = 6 * torch.rand(TOKENS, size // 2)
    return torch.cat([turns.cos()] * 2, 1), torch.cat([turns.sin()] * 2, 1)


def check_rotate(heads: tuple[int, int, int], size: int, cos: Tensor, sin: Tensor, error: float = 0.0) -> None:
    merged = torch.randn(TOKENS, sum(heads) * size)
    found = rotate(merged, cos, sin + error, heads=heads)
    wanted = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    for ours, theirs, turned in zip(found, wanted, (True, True, False), strict=True):
        assert ours.is_contiguous()
        assert_close(ours, reference_rotate(theirs, cos, sin) if turned else theirs)


@pytest.mark.parametrize(("heads", "size"), SHAPES)
def test_rotate(heads: tuple[int, int, int], size: int) -> None:
    check_rotate(heads, size, *angles(size))


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_unrotate(heads: tuple[int, int, int], size: int, strided: bool) -> None:
    cos, sin = angles(size)
    if strided:  # as attention hands them back: tokens and heads changed places
        parts = tuple(torch.randn(count, TOKENS, size).transpose(0, 1) for count in heads)
    else:
        parts = tuple(torch.randn(TOKENS, count, size) for count in heads)
    wanted = [reference_rotate(part, cos, -sin) for part in parts[:2]] + [parts[2]]
    assert_close(unrotate((parts[0], parts[1], parts[2]), cos, sin), torch.cat([w.flatten(1) for w in wanted], 1))


def test_unrotate_is_the_gradient_of_rotate() -> None:
    heads, size = SHAPES[0]
    cos, sin = angles(size)
    x = torch.randn(TOKENS, heads[0], size, requires_grad=True)
    g = torch.randn(TOKENS, heads[0], size)
    (wanted,) = torch.autograd.grad(reference_rotate(x, cos, sin), x, g)
    assert_close(unrotate((g, g, g), cos, sin)[:, : heads[0] * size].unflatten(1, (-1, size)), wanted)


def test_a_small_error_would_show() -> None:
    heads, size = SHAPES[0]
    with pytest.raises(AssertionError):
        check_rotate(heads, size, *angles(size), error=1e-4)
