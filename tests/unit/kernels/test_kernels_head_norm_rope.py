"""RMSNorm per head with RoPE, on the torch references: equal to the modules of transformers, and accurate in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from pantheraml.kernels.head_norm_rope import (
    HeadNorms,
    head_norm_rope,
    head_norm_rope_backward,
    output_determines_input,
)

TOKENS, SIZE = 64, 64
HEADS = (4, 2, 2)


def norms_of(gain: Tensor, *, plus_one: bool) -> HeadNorms:
    weight = gain - int(plus_one)
    return HeadNorms(weight, weight, 1e-6, plus_one)


def table() -> tuple[Tensor, Tensor]:
    theta = torch.arange(TOKENS)[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    return torch.cat([theta.cos()] * 2, 1), torch.cat([theta.sin()] * 2, 1)


def module_of(norms: HeadNorms) -> torch.nn.Module:
    module: torch.nn.Module = (Gemma3RMSNorm if norms.plus_one else Qwen3RMSNorm)(SIZE, eps=norms.epsilon)
    module.weight = torch.nn.Parameter(norms.query.clone())
    return module


def by_modules(merged: Tensor, norms: HeadNorms, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = merged.unflatten(1, (-1, SIZE)).split(HEADS, dim=1)
    module = module_of(norms).to(merged.dtype)
    q, k = apply_rotary_pos_emb(module(q), module(k), cos, sin, unsqueeze_dim=1)
    return q, k, v


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_values_and_gradients_are_those_of_the_modules(plus_one: bool, kept: bool) -> None:
    torch.manual_seed(0)
    norms, (cos, sin) = norms_of(0.5 + torch.rand(SIZE), plus_one=plus_one), table()
    merged = torch.randn(TOKENS, sum(HEADS) * SIZE, requires_grad=True)
    expected = by_modules(merged, norms, cos, sin)
    g = tuple(torch.randn_like(part) for part in expected)
    (gradient,) = torch.autograd.grad(expected, merged, g)
    rows = head_norm_rope(merged.detach(), norms, cos, sin, heads=HEADS, keep_input=(kept, kept))
    for ours, theirs in zip(rows[:3], expected, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)
    actual = head_norm_rope_backward(
        (g[0], g[1], g[2]), rows.saved, rows.inverse, norms, cos, sin, kept_input=(kept, kept)
    )
    torch.testing.assert_close(actual.rows, gradient, rtol=1e-4, atol=1e-5)


def bf16_errors(gain: Tensor, *, correlation: float, kept: bool) -> float:
    """Relative error of the gradient of rows in bf16, against float32. A gradient parallel to the heads makes the term
    with the normalized input largest."""
    torch.manual_seed(0)
    norms, (cos, sin) = norms_of(gain, plus_one=False), table()
    merged = torch.randn(TOKENS, sum(HEADS) * SIZE).bfloat16()
    exact = head_norm_rope(merged.float(), norms, cos, sin, heads=HEADS, keep_input=(True, True))
    rows = head_norm_rope(merged, norms, cos, sin, heads=HEADS, keep_input=(kept, kept))
    q, k, v = (torch.randn_like(part) + correlation * part for part in exact[:3])
    expected = head_norm_rope_backward(
        (q, k, v), exact.saved, exact.inverse, norms, cos, sin, kept_input=(True, True)
    ).rows
    actual = head_norm_rope_backward((q, k, v), rows.saved, rows.inverse, norms, cos, sin, kept_input=(kept, kept)).rows
    return float((actual - expected).norm() / expected.norm())


def test_gradients_from_bf16_outputs_are_accurate() -> None:
    """Also for weights at the bound of what backward takes from the output; beyond it, the input is kept."""
    even = 0.5 + torch.rand(SIZE, generator=torch.Generator().manual_seed(1))
    uneven = torch.ones(SIZE)
    uneven[: SIZE // 2] = 0.09
    assert output_determines_input(even)
    assert output_determines_input(uneven)
    assert bf16_errors(even, correlation=0.0, kept=False) < 0.002
    assert bf16_errors(uneven, correlation=0.0, kept=False) < 0.01
    assert bf16_errors(uneven, correlation=3.0, kept=False) < 0.03
    uneven[: SIZE // 2] = 0.003
    assert not output_determines_input(uneven)
    assert bf16_errors(uneven, correlation=3.0, kept=False) > 0.03
    assert bf16_errors(uneven, correlation=3.0, kept=True) < 0.003


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_inputs_are_kept_for_weights_without_an_inverse(value: float) -> None:
    gain = torch.ones(SIZE)
    gain[3] = value
    assert not output_determines_input(gain)


def test_gradients_of_weights_need_the_inputs() -> None:
    norms, (cos, sin) = norms_of(torch.ones(SIZE), plus_one=False), table()
    rows = head_norm_rope(torch.randn(TOKENS, sum(HEADS) * SIZE), norms, cos, sin, heads=HEADS)
    with pytest.raises(ValueError, match="inputs"):
        head_norm_rope_backward(rows[:3], rows.saved, rows.inverse, norms, cos, sin, weights=True)
