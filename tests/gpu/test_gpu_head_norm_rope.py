"""RMSNorm per head with RoPE on a GPU, against the torch reference, and fused families against their own classes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.dispatch import references_only
from pantheraml.kernels.head_norm_rope import AttentionHeads, HeadNorms, head_norm_rope, head_norm_rope_backward
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import fuse
from tests.interpreter.comparison import assert_same_codes
from tests.unit.models.test_models_fast import LAYERS, adapted, base_model, results

GPU = torch.device("cuda")
TOKENS = 300
SHAPES = [((32, 8, 8), 128), ((8, 4, 4), 256), ((16, 16, 16), 64), ((40, 8, 8), 128), ((12, 4, 4), 80), ((6, 2, 2), 96)]
"""Qwen3-4B's heads, Gemma 3's, and others."""
BOTH = (False, True)


def inputs(heads: tuple[int, int, int], size: int, *, plus_one: bool) -> tuple[Tensor, HeadNorms, Tensor, Tensor]:
    torch.manual_seed(0)
    angles = 6 * torch.rand(TOKENS, size // 2, device=GPU)
    cos, sin = (torch.cat([table] * 2, 1).bfloat16() for table in (angles.cos(), angles.sin()))
    query, key = (0.5 + torch.rand(2, size, device=GPU) - int(plus_one)).bfloat16()
    merged = torch.randn(TOKENS, sum(heads) * size, device=GPU).bfloat16()
    return merged, HeadNorms(query, key, 1e-6, plus_one), cos, sin


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize(("plus_one", "in_place"), itertools.product(BOTH, BOTH))
def test_forward(heads: tuple[int, int, int], size: int, plus_one: bool, in_place: bool) -> None:
    merged, *rest = inputs(heads, size, plus_one=plus_one)
    with references_only():
        expected: AttentionHeads = head_norm_rope(merged.clone(), *rest, heads=heads)
    actual = head_norm_rope(merged.clone(), *rest, heads=heads, in_place=in_place)
    for ours, theirs in zip(actual[:3], expected[:3], strict=True):
        near = torch.isclose(ours, theirs, rtol=2**-6, atol=1e-3)
        # A normalized value at a rounding boundary may fall to the other side (1 of 614,400 seen); RoPE may then cancel
        # most of what it is added to.
        assert (~near).float().mean() <= 1e-5
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(actual.inverse, expected.inverse, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("heads", "size"), SHAPES)
@pytest.mark.parametrize(("kept", "quantize"), itertools.product([(False, False), (True, True), (True, False)], BOTH))
def test_backward(heads: tuple[int, int, int], size: int, kept: tuple[bool, bool], quantize: bool) -> None:
    merged, norms, cos, sin = inputs(heads, size, plus_one=False)
    rows = head_norm_rope(merged, norms, cos, sin, heads=heads, keep_input=kept)
    q, k, v = (torch.randn(count, TOKENS, size, device=GPU).bfloat16().transpose(0, 1) for count in heads)
    options: Any = {"kept_input": kept, "quantize": quantize, "pad_cols": 64, "weights": all(kept)}
    arguments = (q, k, v), rows.saved, rows.inverse, norms, cos, sin
    actual = head_norm_rope_backward(*arguments, **options)
    with references_only():
        expected = head_norm_rope_backward(*arguments, **options)
    columns = slice(0, merged.shape[1])
    if quantize:
        torch.testing.assert_close(actual.scales, expected.scales, rtol=1e-4, atol=0)
        assert_same_codes(actual.rows[:, columns], expected.rows[:, columns])
    else:
        torch.testing.assert_close(actual.rows[:, columns], expected.rows[:, columns], rtol=2**-6, atol=1e-3)
    for ours, theirs in zip(actual.weights or (), expected.weights or (), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "granite", "smollm3", "ministral"])
@pytest.mark.parametrize("documents", BOTH)
def test_fused_families_match_their_classes(family: str, documents: bool) -> None:
    """In bf16; the comparison on first use (in float32) must find no difference either."""
    torch.manual_seed(0)
    heads = {} if family in ("llama", "granite", "smollm3") else {"head_dim": 64}
    base = base_model(family, hidden_size=256, intermediate_size=512, initializer_range=0.05, **heads)
    if documents:
        assert use_document_attention(base) is None
    plain = adapted(base.to(torch.bfloat16).to(GPU), size=0.05)
    ours = copy.deepcopy(plain)
    report = fuse(ours)
    assert (report.fused, dict(report.reasons)) == (LAYERS, {})
    ids = torch.randint(4, 256, (2, 64), device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    actual, expected = (results(model, input_ids=ids, labels=ids) for model in (ours, plain))
    for name, theirs in expected.items():
        distance = float((actual[name].float() - theirs.float()).norm() / theirs.float().norm())
        assert distance < 0.08, f"{name}: {distance}"
