"""Removed dropout is gone from every forward, wherever a family keeps its probability, and is reported by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import FalconConfig, FalconForCausalLM, GPT2Config, GPT2LMHeadModel

from pantheraml.models.dropout import remove_dropout, remove_dropout_from_configs

TOKENS = torch.arange(12)[None]


def gpt2() -> Any:
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.5, embd_pdrop=0.0)
    return GPT2LMHeadModel(config)


def falcon() -> Any:
    """Reads its config in every forward."""
    config = FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, hidden_dropout=0.5)
    return FalconForCausalLM(config)


def adapted() -> Any:
    model = gpt2()
    remove_dropout(model)
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, target_modules=["c_attn"], init_lora_weights=False))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("make", "names"),
    [(gpt2, {"resid_dropout", "attn_dropout", "dropout"}), (falcon, {"hidden_dropout"}), (adapted, {"lora_dropout"})],
)
def test_all_randomness_is_removed(make: Any, names: set[str]) -> None:
    torch.manual_seed(0)
    model = make()
    model.train()
    with torch.no_grad():
        assert not torch.equal(model(TOKENS).logits, model(TOKENS).logits), "there is dropout to remove"
        actual = remove_dropout(model) | remove_dropout_from_configs(model)
        assert names <= actual
        still = model(TOKENS).logits
        assert torch.equal(model(TOKENS).logits, still)
        torch.testing.assert_close(still, model.eval()(TOKENS).logits)


def test_a_model_without_dropout_reports_none() -> None:
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, **still)
    assert config.summary_first_dropout > 0, "belongs to a head that the model does not have"
    model = GPT2LMHeadModel(config)
    assert not remove_dropout(model) | remove_dropout_from_configs(model)
