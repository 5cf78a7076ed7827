"""Router loss of mixtures of experts: every family, and models under a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel
from pantheraml.models.router_loss import find_router_loss
from tests import toy
from tests.unit.models.tiny_families import tiny_configs

KNOWN = {
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "gpt_oss",
    "olmoe",
    "phimoe",
    "granitemoe",
    "jamba",
    "jetmoe",
}


def test_every_family_with_a_router_loss_is_supported() -> None:
    """Unsupported ones would raise."""
    actual = set()
    for family, config in tiny_configs():
        text = config.get_text_config()
        if hasattr(text, "output_router_logits"):
            text.output_router_logits = True
            if find_router_loss(AutoModelForCausalLM.from_config(config)) is not None:
                actual.add(family)
    assert actual >= KNOWN


@pytest.mark.parametrize("how", ["config", "argument"])
@pytest.mark.parametrize("mask", [None, "padding"])
def test_a_fast_model_matches_transformers_loss(tmp_path: Path, how: str, mask: str | None) -> None:
    place = toy.write_mixtral(tmp_path, output_router_logits=how == "config")
    fast, _ = FastLanguageModel.from_pretrained(str(place), full_finetuning=True, device_map="cpu")
    plain = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    ids = torch.randint(2, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if mask is not None:
        inputs["attention_mask"] = (torch.arange(9) < torch.tensor([[9], [4], [6]])).long()
        inputs["labels"][inputs["attention_mask"] == 0] = -100
    if how == "argument":
        inputs["output_router_logits"] = True
    expected = plain.train()(**inputs)
    assert expected.aux_loss > 1
    for more in ({}, {"fused_lm_head": True}):
        actual = fast.train()(**inputs, **more)
        assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        torch.testing.assert_close(actual.aux_loss, expected.aux_loss)
        fast.zero_grad()
        actual.loss.backward()
        plain.zero_grad()
        plain(**inputs).loss.backward()
        gradient = dict(fast.named_parameters())["model.layers.0.mlp.gate.weight"].grad
        torch.testing.assert_close(gradient, dict(plain.named_parameters())["model.layers.0.mlp.gate.weight"].grad)


def test_a_family_of_experts_without_experts_has_no_auxiliary_loss(tmp_path: Path) -> None:
    """Granite 4.0 h has such models; TRL asks for the loss wherever their config has a coefficient."""
    config = GraniteMoeHybridConfig(
        vocab_size=320, hidden_size=16, intermediate_size=16, shared_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_local_experts=0, num_experts_per_tok=0,
        layer_types=["attention"], mamba_n_heads=4, mamba_d_head=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    toy.write_tokenizer(tmp_path)
    fast, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path), full_finetuning=True, device_map="cpu")
    args = SFTConfig(output_dir=str(tmp_path / "run"), max_steps=1, report_to="none", use_cpu=True, bf16=False)
    data = Dataset.from_list([{"text": "one two three"}])
    trainer = SFTTrainer(model=fast, args=args, processing_class=tokenizer, train_dataset=data)
    assert trainer.train().training_loss > 0
    ids = torch.arange(2, 10)[None]
    assert fast.generate(input_ids=ids, max_new_tokens=2).shape == (1, 10)


def test_experts_keep_their_auxiliary_loss(tmp_path: Path) -> None:
    place = toy.write_mixtral(tmp_path, output_router_logits=True)
    fast, _ = FastLanguageModel.from_pretrained(str(place), full_finetuning=True, device_map="cpu")
    assert fast.config.router_aux_loss_coef > 0
