from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.head_norm_rope import (
    AttentionHeads,
    HeadNorms,
    head_norm_rope,
    head_norm_rope_backward,
    reference_head_norm_rope,
)
from tests.interpreter.comparison import assert_close, assert_same_rows

TOKENS = 5
EPSILON = 1e-3
SHAPES = [((4, 2, 2), 16), ((9, 3, 3), 24), ((8, 4, 4), 256), ((3, 1, 1), 80)]
"""Heads and head size: one program's worth, more with a size that is not a power of two, Gemma 3's and Phi-2's."""
BOTH = (False, True)
KEPT = [(False, False), (True, False), (False, True), (True, True)]
BACKWARD = 4e-6
"""The gradient is a difference of terms up to four times as large."""

Heads = tuple[int, int, int]


def angles(size: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    theta = 6 * torch.rand(TOKENS, size // 2)
    return scale * torch.cat([theta.cos()] * 2, 1), scale * torch.cat([theta.sin()] * 2, 1)


def norms_of(size: int, *, plus_one: bool) -> HeadNorms:
    query, key = 0.5 + torch.rand(2, size) - int(plus_one)
    return HeadNorms(query, key, EPSILON, plus_one)


def expected_forward(merged: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor, heads: Heads) -> list[Tensor]:
    q, k, v = merged.unflatten(1, (-1, cos.shape[1])).split(heads, dim=1)
    q, k = (
        reference_head_norm_rope(x, weight, norms.epsilon, cos, sin, plus_one=norms.plus_one)[0]
        for x, weight in ((q, norms.query), (k, norms.key))
    )
    return [q, k, v]


def check_forward(
    heads: Heads, size: int, *, plus_one: bool = False, in_place: bool = False, error: float = 0.0, **options: Any
) -> tuple[AttentionHeads, Tensor]:
    norms, (cos, sin) = norms_of(size, plus_one=plus_one), angles(size)
    merged = torch.randn(TOKENS, sum(heads) * size)
    given = merged.clone()
    wrong = norms._replace(query=norms.query + error)
    rows = head_norm_rope(given, wrong, cos, sin, heads=heads, in_place=in_place, **options)
    for ours, theirs in zip(rows[:3], expected_forward(merged, norms, cos, sin, heads), strict=True):
        assert_close(ours, theirs)
    return rows, given


def shares(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize("plus_one", BOTH)
def test_forward(heads: Heads, size: int, plus_one: bool) -> None:
    rows, given = check_forward(heads, size, plus_one=plus_one)
    assert all(part.is_contiguous() and not shares(part, given) for part in rows[:3])
    assert rows.saved == (rows.query, rows.key)


@pytest.mark.parametrize("keep_input", KEPT)
def test_forward_in_place_keeps_the_inputs_that_are_needed(keep_input: tuple[bool, bool]) -> None:
    heads, size = SHAPES[1]
    torch.manual_seed(0)
    rows, given = check_forward(heads, size, in_place=True, keep_input=keep_input)
    torch.manual_seed(0)
    _, untouched = check_forward(heads, size, keep_input=(True, True))
    assert shares(rows.value, given)
    inputs = untouched.unflatten(1, (-1, size)).split(heads, dim=1)
    for part, saved, source, kept in zip(rows[:2], rows.saved, inputs, keep_input, strict=False):
        assert shares(part, given) != kept
        assert shares(saved, given)
        assert torch.equal(saved, source if kept else part)


def exact_gradient(
    merged: Tensor, parts: tuple[Tensor, ...], norms: HeadNorms, cos: Tensor, sin: Tensor, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the merged matrix and of both weights, by autograd in float64."""
    wide = norms._replace(query=norms.query.double(), key=norms.key.double())
    leaves = [tensor.double().requires_grad_() for tensor in (merged, wide.query, wide.key)]
    q, k, v = leaves[0].unflatten(1, (-1, cos.shape[1])).split(heads, dim=1)

    def rotated(x: Tensor, weight: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norms.epsilon)
        low, high = (normal * (weight + int(norms.plus_one))).chunk(2, dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat((low, high), -1) * c + torch.cat((-high, low), -1) * s

    outs = [rotated(q, leaves[1]), rotated(k, leaves[2]), v]
    found = torch.autograd.grad(outs, leaves, [part.double() for part in parts])
    return found[0].float(), found[1].float(), found[2].float()


def check_backward(
    heads: Heads,
    size: int,
    *,
    plus_one: bool = False,
    kept: tuple[bool, bool] = (False, False),
    strided: bool = False,
    quantize: bool = False,
    scaled: bool = False,
    error: float = 0.0,
    table_scale: float = 1.0,
) -> None:
    norms, (cos, sin) = norms_of(size, plus_one=plus_one), angles(size, table_scale)
    merged = torch.randn(TOKENS, sum(heads) * size)
    shape = [(count, TOKENS, size) if strided else (TOKENS, count, size) for count in heads]
    q, k, v = (torch.randn(s).transpose(0, 1) if strided else torch.randn(s) for s in shape)
    rows = head_norm_rope(merged.clone(), norms, cos, sin, heads=heads, keep_input=kept)
    saved = rows.saved[0] + error, rows.saved[1]
    multiplier = torch.rand(merged.shape[1]) + 0.5 if scaled else None
    actual = head_norm_rope_backward(
        (q, k, v), saved, rows.inverse, norms, cos, sin,
        kept_input=kept, quantize=quantize, pad_cols=64, multiplier=multiplier, weights=all(kept),
    )  # fmt: skip
    expected, *weights = exact_gradient(merged, (q, k, v), norms, cos, sin, heads)
    if quantize:
        assert actual.scales is not None
        assert_same_rows(actual.rows[:, :-64], actual.scales, *reference_quantize_rows(expected, multiplier))
    else:
        assert actual.scales is None
        assert_close(actual.rows[:, :-64], expected, tolerance=BACKWARD)
    assert (actual.weights is not None) == all(kept)
    for ours, theirs in zip(actual.weights or (), weights, strict=False):
        assert_close(ours, theirs, tolerance=BACKWARD)


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize(("plus_one", "quantize"), itertools.product(BOTH, BOTH))
@pytest.mark.parametrize("kept", [(False, False), (True, True)])
def test_backward(heads: Heads, size: int, plus_one: bool, quantize: bool, kept: tuple[bool, bool]) -> None:
    check_backward(heads, size, plus_one=plus_one, quantize=quantize, kept=kept)


@pytest.mark.parametrize("kept", KEPT[1:3])
@pytest.mark.parametrize("quantize", BOTH)
def test_backward_of_strided_gradients(kept: tuple[bool, bool], quantize: bool) -> None:
    check_backward(*SHAPES[1], kept=kept, strided=True, quantize=quantize, scaled=quantize)


def test_backward_from_output_with_a_scaled_table() -> None:
    """YaRN scales cosine and sine."""
    check_backward(*SHAPES[0], table_scale=1.3)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("part", [0, 1, 2])
def test_nonfinite_rows_become_nan(part: int) -> None:
    heads, size = SHAPES[1]
    norms, (cos, sin) = norms_of(size, plus_one=False), angles(size)
    rows = head_norm_rope(torch.randn(TOKENS, sum(heads) * size), norms, cos, sin, heads=heads)
    q, k, v = (torch.randn(TOKENS, count, size) for count in heads)
    (q, k, v)[part][2, 0, 3] = torch.nan
    actual = head_norm_rope_backward((q, k, v), rows.saved, rows.inverse, norms, cos, sin, quantize=True)
    assert actual.scales is not None
    is_nan = (actual.rows.float() * actual.scales[:, None]).isnan()
    assert is_nan[2].all()
    assert not is_nan[[0, 1, 3, 4]].any()


def test_small_error_is_detected() -> None:
    heads, size = SHAPES[0]
    with pytest.raises(AssertionError):
        check_forward(heads, size, error=1e-4)
    for kept in ((False, False), (True, True)):
        with pytest.raises(AssertionError):
            check_backward(heads, size, kept=kept, error=1e-3)
        with pytest.raises(AssertionError):
            check_backward(heads, size, kept=kept, quantize=True, error=1e-2)
