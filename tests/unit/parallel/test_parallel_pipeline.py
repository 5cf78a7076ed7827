"""Which layers a stage gets, which parts a model is cut into, and that the stages one after another are the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.parallel.pipeline import (
    BodyParts,
    PassThrough,
    find_body_parts,
    prune_to_stages,
    stage_view,
    tied_weight,
)

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 3},
    "phi3": {},
    "gpt_neox": {},
    "gpt2": {},
}


def make(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def test_body_parts_by_plan_and_by_order() -> None:
    assert find_body_parts(make("llama").model) == BodyParts("embed_tokens", (), "layers", ("norm",))
    gpt2 = make("gpt2").transformer
    assert getattr(gpt2.config, "base_model_pp_plan", None) is None
    assert find_body_parts(gpt2) == BodyParts("wte", ("wpe", "drop"), "h", ("ln_f",))


def test_model_without_a_layer_list_is_rejected() -> None:
    body = make("llama").model
    body.layers = nn.ModuleList(list(body.layers)[:2])
    with pytest.raises(UnsupportedModelError, match="LlamaModel cannot be split"):
        find_body_parts(body)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_sequence_match_the_full_model(family: str) -> None:
    body = make(family).base_model
    parts = find_body_parts(body)
    ids = torch.arange(2, 14).view(2, 6)
    inputs = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]), "use_cache": False}
    with torch.no_grad():
        expected = body(input_ids=ids, **inputs).last_hidden_state
        hidden = stage_view(body, parts, range(1), first=True, last=False)(input_ids=ids, **inputs).last_hidden_state
        for layers in (range(1, 2), range(2, 3)):
            assert not torch.allclose(hidden, expected, rtol=1e-2)
            stage = stage_view(body, parts, layers, first=False, last=layers.stop == 3)
            hidden = stage(inputs_embeds=hidden, **inputs).last_hidden_state
    assert torch.equal(hidden, expected)


def test_embedding_dropout_runs_on_the_first_stage_only() -> None:
    body = make("gpt2", embd_pdrop=0.5).transformer.train()
    parts = find_body_parts(body)
    empty = stage_view(body, parts, range(0), first=False, last=False)
    hidden = torch.randn(2, 3, 16)
    assert torch.equal(empty(inputs_embeds=hidden).last_hidden_state, hidden)
    first = stage_view(body, parts, range(0), first=True, last=False)
    assert (first(input_ids=torch.ones(2, 3, dtype=torch.int64)).last_hidden_state == 0).any()


def names_of(whole: nn.Module) -> set[str]:
    return {name for name, _ in whole.named_parameters()}


def cut(whole: Any, layers: range, *, first: bool, last: bool) -> set[str]:
    parts = find_body_parts(whole.base_model)
    prune_to_stages(whole, parts, [stage_view(whole.base_model, parts, layers, first=first, last=last)], last=last)
    return names_of(whole)


def test_parameter_names_are_unchanged_and_unique_to_a_stage() -> None:
    every = names_of(make("llama"))
    first = cut(make("llama"), range(1), first=True, last=False)
    middle = cut(make("llama"), range(1, 2), first=False, last=False)
    last = cut(make("llama"), range(2, 3), first=False, last=True)
    assert first | middle | last == every
    assert len(first) + len(middle) + len(last) == len(every)
    assert "model.layers.1.mlp.up_proj.weight" in middle
    assert {"model.norm.weight", "lm_head.weight"} <= last


def test_a_tied_weight_is_on_the_first_and_the_last_stage_under_one_name() -> None:
    tied = "transformer.wte.weight"
    assert tied in cut(make("gpt2"), range(1), first=True, last=False)
    assert tied not in cut(make("gpt2"), range(1, 2), first=False, last=False)
    whole = make("gpt2")
    last = cut(whole, range(2, 3), first=False, last=True)
    assert tied in last
    assert "lm_head.weight" not in last
    assert "transformer.wpe.weight" not in last
    assert tied_weight(whole) is whole.lm_head.weight


def test_tied_weight() -> None:
    assert tied_weight(make("llama")) is None
    assert tied_weight(make("llama", tie_word_embeddings=True)) is not None


def test_process_with_several_stages_keeps_modules_of_all() -> None:
    whole = make("llama")
    body = whole.model
    parts = find_body_parts(body)
    views = [
        stage_view(body, parts, range(1), first=True, last=False),
        stage_view(body, parts, range(2, 3), first=False, last=True),
    ]
    prune_to_stages(whole, parts, views, last=True)
    assert [isinstance(layer, PassThrough) for layer in body.layers] == [False, True, False]
    assert isinstance(body.embed_tokens, nn.Embedding)
    assert isinstance(whole.lm_head, nn.Linear)
