"""Rows that share a prompt on a GPU: attention of ends of documents, and scores of a fused model."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pantheraml.models.document_layout import DocumentLayout
from pantheraml.models.fast import fuse, is_fused
from pantheraml.models.prefix_attention import _kernel_aligns_ends, prefix_attention
from pantheraml.models.shared_prefixes import find_shared_prefixes
from tests.gpu.test_gpu_attention import distance
from tests.unit.models.test_models_fast import LAYERS
from tests.unit.models.test_models_shared_prefixes import group
from tests.unit.models.test_models_unpadded import model, scores_and_gradients

TOLERANCE = 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # the kernel, and row by row
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("heads", "key_heads", "head_dim"), [(8, 2, 64), (4, 4, 128), (4, 1, 256)])
def test_ends_attend_like_whole_rows(
    heads: int, key_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    assert _kernel_aligns_ends(torch.device("cuda"))
    tokens = np.concatenate([np.tile(np.arange(130), (3, 1)), 1_000 * (1 + np.arange(3)[:, None]) + np.arange(90)], 1)
    sharing = find_shared_prefixes(tokens, [0, 0, 0])
    assert sharing is not None
    prefixes = sharing.prefixes.to_device(torch.device("cuda"))
    own = list(map(len, sharing.kept))
    ends = torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32, device="cuda")
    documents = DocumentLayout(ends, max(own), prefixes)
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (heads, key_heads, key_heads)
    drawn = [torch.randn(1, n, sum(own), head_dim, generator=generator, device="cuda").to(dtype) for n in sizes]
    tensors = [tensor.requires_grad_() for tensor in drawn]
    out = prefix_attention(*tensors, documents, window=window, dropout=0.0, scaling=None)  # type: ignore[misc]
    exact = [tensor.detach().float().requires_grad_() for tensor in drawn]
    expected = _whole(exact, prefixes, window)
    assert distance(out, expected) <= TOLERANCE
    weights = torch.randn(out.shape, generator=generator, device="cuda")
    gradients = torch.autograd.grad((out.float() * weights).sum(), tensors)
    for actual, right in zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
        assert distance(actual, right) <= TOLERANCE


def _whole(tensors: list[Tensor], prefixes: Any, window: int | None) -> Tensor:
    """Each whole row by itself; of its outputs, those of the computed tokens: [1, S, H, D]."""
    query, key, value = (tensor[0].index_select(1, prefixes.source) for tensor in tensors)
    groups, parts = query.shape[0] // key.shape[0], []
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    for begin, end in itertools.pairwise(prefixes.boundaries.tolist()):
        q, k, v = (tensor[:, begin:end] for tensor in (query, key, value))
        mask = torch.ones(end - begin, end - begin, dtype=torch.bool, device="cuda").tril()
        mask = mask if window is None else mask.triu(1 - window)
        parts.append((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, 1).transpose(0, 1).index_select(0, prefixes.first)[None]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_scores_and_gradients_are_those_of_whole_rows(family: str, checkpointed: bool) -> None:
    whole = model(family, fuse=False).to("cuda", torch.bfloat16)
    assert fuse(whole).fused == LAYERS
    if checkpointed:
        whole.get_base_model().gradient_checkpointing_enable()
        _kernel_aligns_ends.cache_clear()  # the first pass then checks the kernel within a checkpoint
    inputs = {name: tensor.cuda() for name, tensor in group().items()}
    ours = scores_and_gradients(whole, inputs, unpadded=True)
    theirs = scores_and_gradients(whole, inputs, unpadded=False)
    assert all(layer.fused_parts.ran for layer in whole.modules() if is_fused(layer))
    for name in ("loss", "log_probs", *(name for name in theirs if "lora_B" in name)):
        assert distance(ours[name].float(), theirs[name].float()) <= 3 * TOLERANCE, name
