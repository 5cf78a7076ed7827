from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.quantise_rows import reference_quantise_rows
from pantheraml.kernels.rotary import reference_rotate, rotate, unrotate, unrotate_quantised
from tests.interpreter.comparison import assert_close, assert_same_rows

TOKENS = 5
SHAPES = [((4, 2, 2), 16), ((9, 3, 3), 24)]
"""Heads and their size: those of one program, and more, of a size that is no power of two."""


def angles(size: int) -> tuple[Tensor, Tensor]:
    turns = 6 * torch.rand(TOKENS, size // 2)
    return torch.cat([turns.cos()] * 2, 1), torch.cat([turns.sin()] * 2, 1)


def gradients(heads: tuple[int, int, int], size: int, *, strided: bool) -> tuple[Tensor, Tensor, Tensor]:
    if strided:  # as attention hands them back: tokens and heads changed places
        q, k, v = (torch.randn(count, TOKENS, size).transpose(0, 1) for count in heads)
    else:
        q, k, v = (torch.randn(TOKENS, count, size) for count in heads)
    return q, k, v


def turned_back(parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    turned = [reference_rotate(part, cos, -sin) for part in parts[:2]]
    return torch.cat([part.flatten(1) for part in (*turned, parts[2])], 1)


def check_rotate(
    heads: tuple[int, int, int], size: int, cos: Tensor, sin: Tensor, error: float = 0.0, *, in_place: bool = False
) -> None:
    merged = torch.randn(TOKENS, sum(heads) * size)
    given = merged.clone()
    found = rotate(given, cos, sin + error, heads=heads, in_place=in_place)
    wanted = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    for ours, theirs, turned in zip(found, wanted, (True, True, False), strict=True):
        assert ours.is_contiguous() != in_place
        assert (ours.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()) == in_place
        assert_close(ours, reference_rotate(theirs, cos, sin) if turned else theirs)
    assert in_place or torch.equal(given, merged)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("heads", "size"), SHAPES)
def test_rotate(heads: tuple[int, int, int], size: int, in_place: bool) -> None:
    check_rotate(heads, size, *angles(size), in_place=in_place)


def check_unrotate(
    heads: tuple[int, int, int], size: int, *, strided: bool = False, room: int = 0, error: float = 0.0
) -> None:
    cos, sin = angles(size)
    parts = gradients(heads, size, strided=strided)
    columns = sum(heads) * size
    found = unrotate(parts, cos, sin + error, room=room)
    assert found.shape == (TOKENS, columns + room)
    assert found[:, columns:].isnan().all()
    assert_close(found[:, :columns], turned_back(parts, cos, sin))


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("room", [0, 64])
def test_unrotate(heads: tuple[int, int, int], size: int, strided: bool, room: int) -> None:
    check_unrotate(heads, size, strided=strided, room=room)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_and_their_gradients_pass_as_they_are(value: float) -> None:
    heads, size = SHAPES[1]
    cos, sin = angles(size)
    merged = torch.randn(TOKENS, sum(heads) * size)
    merged[2, -5] = value
    q, k, v = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    _, _, found = rotate(merged, cos, sin, heads=heads)
    assert torch.equal(found.view(torch.int32), v.contiguous().view(torch.int32))
    back = unrotate((q, k, v), cos, sin)[:, -heads[2] * size :]
    assert torch.equal(back.contiguous().view(torch.int32), v.flatten(1).contiguous().view(torch.int32))


def check_quantised(
    heads: tuple[int, int, int], size: int, *, strided: bool = False, scaled: bool = False, error: float = 0.0
) -> None:
    cos, sin = angles(size)
    parts = gradients(heads, size, strided=strided)
    multiplier = torch.rand(sum(heads) * size) + 0.5 if scaled else None
    payload, scales = unrotate_quantised(parts, cos, sin + error, room=64, multiplier=multiplier)
    assert payload.shape == (TOKENS, sum(heads) * size + 64)
    wanted = reference_quantise_rows(turned_back(parts, cos, sin), multiplier)
    assert_same_rows(payload[:, :-64], scales, *wanted)


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_unrotate_and_quantise(heads: tuple[int, int, int], size: int, strided: bool, scaled: bool) -> None:
    check_quantised(heads, size, strided=strided, scaled=scaled)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_no_number_is_none_afterwards(value: float, part: int) -> None:
    heads, size = SHAPES[1]
    cos, sin = angles(size)
    parts = gradients(heads, size, strided=False)
    parts[part][2, 1, 3] = value
    payload, scales = unrotate_quantised(parts, cos, sin)
    strange = (payload.float() * scales[:, None]).isnan()
    assert strange[2].all()
    assert not strange[[0, 1, 3, 4]].any()


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
    with pytest.raises(AssertionError):
        check_unrotate(heads, size, error=1e-4)
    with pytest.raises(AssertionError):
        check_quantised(heads, size, error=1e-3)
