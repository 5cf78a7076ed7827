from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.rotary import reference_rope, rope_backward, rope_backward_quantized, rope_forward
from tests.interpreter.comparison import assert_close, assert_same_rows

TOKENS = 5
SHAPES = [((4, 2, 2), 16), ((9, 3, 3), 24)]
"""Heads and head size: one program's worth, and more with a size that is not a power of two."""


def angles(size: int) -> tuple[Tensor, Tensor]:
    theta = 6 * torch.rand(TOKENS, size // 2)
    return torch.cat([theta.cos()] * 2, 1), torch.cat([theta.sin()] * 2, 1)


def gradients(heads: tuple[int, int, int], size: int, *, strided: bool) -> tuple[Tensor, Tensor, Tensor]:
    if strided:  # as attention returns them: tokens and heads transposed
        q, k, v = (torch.randn(count, TOKENS, size).transpose(0, 1) for count in heads)
    else:
        q, k, v = (torch.randn(TOKENS, count, size) for count in heads)
    return q, k, v


def reference_backward(parts: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    rotated = [reference_rope(part, cos, -sin) for part in parts[:2]]
    return torch.cat([part.flatten(1) for part in (*rotated, parts[2])], 1)


def check_forward(
    heads: tuple[int, int, int], size: int, cos: Tensor, sin: Tensor, error: float = 0.0, *, in_place: bool = False
) -> None:
    merged = torch.randn(TOKENS, sum(heads) * size)
    given = merged.clone()
    actual = rope_forward(given, cos, sin + error, heads=heads, in_place=in_place)
    expected = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    for ours, theirs, rotated in zip(actual, expected, (True, True, False), strict=True):
        assert ours.is_contiguous() != in_place
        assert (ours.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()) == in_place
        assert_close(ours, reference_rope(theirs, cos, sin) if rotated else theirs)
    assert in_place or torch.equal(given, merged)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("heads", "size"), SHAPES)
def test_forward(heads: tuple[int, int, int], size: int, in_place: bool) -> None:
    check_forward(heads, size, *angles(size), in_place=in_place)


def check_backward(
    heads: tuple[int, int, int], size: int, *, strided: bool = False, pad_cols: int = 0, error: float = 0.0
) -> None:
    cos, sin = angles(size)
    parts = gradients(heads, size, strided=strided)
    columns = sum(heads) * size
    actual = rope_backward(parts, cos, sin + error, pad_cols=pad_cols)
    assert actual.shape == (TOKENS, columns + pad_cols)
    assert actual[:, columns:].isnan().all()
    assert_close(actual[:, :columns], reference_backward(parts, cos, sin))


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("pad_cols", [0, 64])
def test_backward(heads: tuple[int, int, int], size: int, strided: bool, pad_cols: int) -> None:
    check_backward(heads, size, strided=strided, pad_cols=pad_cols)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_and_their_gradients_are_copied_bitwise(value: float) -> None:
    heads, size = SHAPES[1]
    cos, sin = angles(size)
    merged = torch.randn(TOKENS, sum(heads) * size)
    merged[2, -5] = value
    q, k, v = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    _, _, actual = rope_forward(merged, cos, sin, heads=heads)
    assert torch.equal(actual.view(torch.int32), v.contiguous().view(torch.int32))
    back = rope_backward((q, k, v), cos, sin)[:, -heads[2] * size :]
    assert torch.equal(back.contiguous().view(torch.int32), v.flatten(1).contiguous().view(torch.int32))


def check_quantized(
    heads: tuple[int, int, int], size: int, *, strided: bool = False, scaled: bool = False, error: float = 0.0
) -> None:
    cos, sin = angles(size)
    parts = gradients(heads, size, strided=strided)
    multiplier = torch.rand(sum(heads) * size) + 0.5 if scaled else None
    qdata, scales = rope_backward_quantized(parts, cos, sin + error, pad_cols=64, multiplier=multiplier)
    assert qdata.shape == (TOKENS, sum(heads) * size + 64)
    expected = reference_quantize_rows(reference_backward(parts, cos, sin), multiplier)
    assert_same_rows(qdata[:, :-64], scales, *expected)


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_backward_quantized(heads: tuple[int, int, int], size: int, strided: bool, scaled: bool) -> None:
    check_quantized(heads, size, strided=strided, scaled=scaled)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_nonfinite_rows_become_nan(value: float, part: int) -> None:
    heads, size = SHAPES[1]
    cos, sin = angles(size)
    parts = gradients(heads, size, strided=False)
    parts[part][2, 1, 3] = value
    qdata, scales = rope_backward_quantized(parts, cos, sin)
    is_nan = (qdata.float() * scales[:, None]).isnan()
    assert is_nan[2].all()
    assert not is_nan[[0, 1, 3, 4]].any()


def test_backward_is_the_gradient_of_forward() -> None:
    heads, size = SHAPES[0]
    cos, sin = angles(size)
    x = torch.randn(TOKENS, heads[0], size, requires_grad=True)
    g = torch.randn(TOKENS, heads[0], size)
    (expected,) = torch.autograd.grad(reference_rope(x, cos, sin), x, g)
    assert_close(rope_backward((g, g, g), cos, sin)[:, : heads[0] * size].unflatten(1, (-1, size)), expected)


def test_small_error_is_detected() -> None:
    heads, size = SHAPES[0]
    with pytest.raises(AssertionError):
        check_forward(heads, size, *angles(size), error=1e-4)
    with pytest.raises(AssertionError):
        check_backward(heads, size, error=1e-4)
    with pytest.raises(AssertionError):
        check_quantized(heads, size, error=1e-3)
