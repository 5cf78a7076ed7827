"""The fast class gives trainers the same per-step answers as transformers' own class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from pantheraml.models.causal_lm import make_fast


def fast(folder: Path, *, dora: bool = False) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    make_fast(model)
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], use_dora=dora))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("only_trainable", [False, True])
@pytest.mark.parametrize("exclude_embeddings", [False, True])
def test_num_parameters_matches_transformers(
    tiny_model: Any, tied: bool, only_trainable: bool, exclude_embeddings: bool
) -> None:
    model = fast(tiny_model("llama", tie_word_embeddings=tied)).base_model.model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    counted = model.num_parameters(only_trainable, exclude_embeddings)
    assert counted == PreTrainedModel.num_parameters(model, only_trainable, exclude_embeddings)
    assert counted > 0


def test_train_and_eval_reach_every_module(tiny_model: Any) -> None:
    model = fast(tiny_model("llama"))
    for mode in (True, False, True):
        model.train(mode)
        assert {module.training for module in model.modules()} == {mode}
    next(module for module in model.modules() if isinstance(module, nn.Dropout | nn.Identity)).eval()
    model.train()
    assert all(module.training for module in model.modules())


def test_a_module_that_overrides_train_is_always_called(tiny_model: Any) -> None:
    """DoRA clears its cached norms there."""
    model = fast(tiny_model("llama"), dora=True).train()
    dora = next(module for module in model.modules() if type(module).__name__ == "DoraLinearLayer")
    dora._cache_store("default", torch.ones(1))
    model.train()
    assert not dora._dora_cache
