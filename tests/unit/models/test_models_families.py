"""Every tested family: packed documents do not see each other, and plain_head is right about the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pantheraml.models.adapters import apply_method
from pantheraml.models.families import plain_head
from pantheraml.models.loader import load_model
from pantheraml.specs.train import MethodConfig, ModelConfig

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2"]
CPU = torch.device("cpu")


def load(folder: Path, **kwargs: Any) -> Any:
    return load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, **kwargs)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["logits", "head"])
def test_packed_documents_do_not_see_each_other(tiny_model: Callable[..., Path], family: str, part: str) -> None:
    model = load(tiny_model(family)).eval()
    # two packed rows in one batch, split at different places, longer than the sliding window of 4
    rows = [
        [tokens(n, seed=10 * row + i) for i, n in enumerate(lengths)]
        for row, lengths in enumerate([(7, 3, 8), (1, 11, 6)])
    ]
    ids = torch.stack([torch.cat(docs) for docs in rows])
    positions = torch.stack([torch.cat([torch.arange(len(doc)) for doc in docs]) for docs in rows])
    with torch.no_grad():
        if part == "logits":
            packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        else:
            head, _ = plain_head(model)
            assert head is not None
            packed = (
                head.body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
                @ head.layer.weight.T
            )
        for row, docs in zip(packed, rows, strict=True):
            alone = torch.cat([model(input_ids=doc[None]).logits[0] for doc in docs])
            torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_plain_head_gives_the_logits(tiny_model: Callable[..., Path], family: str, kind: Any) -> None:
    base = load(tiny_model(family), quantize="nf4" if kind == "qlora" else None)
    model = apply_method(base, MethodConfig(kind=kind, rank=2), seed=0).eval()
    head, _ = plain_head(model)
    assert head is not None
    ids = tokens(9)[None]
    positions = torch.arange(9)[None]
    with torch.no_grad():
        hidden = head.body(input_ids=ids, position_ids=positions).last_hidden_state
        expected = model(input_ids=ids).logits
    assert head.layer.bias is None
    torch.testing.assert_close(hidden @ head.layer.weight.T, expected, atol=1e-5, rtol=1e-5)


def test_plain_head_rejects_modified_logits(tiny_model: Callable[..., Path]) -> None:
    # a softcap of 1e3 is invisible on this model's logits (below 1e-6 of them), but not on trained ones
    for family, changes in (("gemma2", {"final_logit_softcapping": 1e3}), ("granite", {})):
        head, reason = plain_head(load(tiny_model(family, **changes)))
        assert head is None
        assert "after the output head" in reason
    head, _ = plain_head(load(tiny_model("gemma2", final_logit_softcapping=None)))
    assert head is not None


def test_plain_head_rejects_modified_hidden_states(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("llama"))
    model.lm_head.register_forward_pre_hook(lambda _layer, args: (args[0] * 1.001,))
    head, reason = plain_head(model)
    assert head is None
    assert "between body and output head" in reason


def test_plain_head_rejects_an_adapted_or_custom_head(tiny_model: Callable[..., Path]) -> None:
    adapted = apply_method(load(tiny_model("llama")), MethodConfig(target_modules=["q_proj", "lm_head"]), seed=0)
    assert plain_head(adapted)[0] is None
    assert "adapter" in plain_head(adapted)[1]

    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    model = load(tiny_model("llama"))
    model.lm_head = Other(32, 264, bias=False)
    assert plain_head(model) == (None, "the output head is not a plain linear layer but Other")


def test_plain_head_preserves_mode_and_rng(tiny_model: Callable[..., Path]) -> None:
    model = load(tiny_model("gpt2"))  # has dropout
    model.train()
    model.transformer.h[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    state = torch.get_rng_state()
    head, _ = plain_head(model)
    assert head is not None
    assert {name: module.training for name, module in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.lm_head._forward_hooks
