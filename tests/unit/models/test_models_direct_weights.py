"""Families whose own code reads a projection's weight: that layer stays unquantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
)

from pantheraml import FastLanguageModel
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.quantize.direct_weights import directly_read
from pantheraml.models.quantize.quantized_linear import QuantizedLinear
from pantheraml.models.tiny_model import tiny_config
from tests import toy
from tests.unit.models.test_models_checkpoint_formats import load, quantized_folder


@pytest.fixture(scope="module")
def falcon_h1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("falcon") / "model"
    toy.write_tokenizer(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(FalconH1Config())).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit", "load_in_fp8"])
def test_falcon_h1_trains_over_quantized_weights(falcon_h1: Path, option: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(falcon_h1), device_map="cpu", **{option: True})
    layer: Any = model.model.layers[0]
    assert type(layer.mamba.out_proj) is nn.Linear
    assert isinstance(layer.mamba.in_proj, QuantizedLinear)
    assert isinstance(layer.self_attn.q_proj, QuantizedLinear)
    fast = FastLanguageModel.get_peft_model(model, r=4, target_modules=["q_proj", "in_proj", "down_proj"]).train()
    ids = torch.arange(2, 14)[None] % model.config.vocab_size
    fast(input_ids=ids, labels=ids).loss.backward()
    trained = [p for p in fast.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    assert any(p.grad.any() for p in trained)


def test_common_families_are_quantized_as_a_whole() -> None:
    """A wrong match would cost memory without a sign of it."""
    for config in (LlamaConfig(), MixtralConfig(), Qwen3Config(), Gemma2Config(), Phi3Config(), GPT2Config()):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(config))
        assert directly_read(model) <= {"lm_head"}, type(model)


def test_a_quantized_checkpoint_of_such_a_family_is_refused(falcon_h1: Path, tmp_path: Path) -> None:
    folder, expected = quantized_folder(falcon_h1, tmp_path, "fp8 by row")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mamba\.out_proj"):
        load(folder)
    dense = load(folder, quantize="dense")
    ids = torch.arange(12)[None]
    torch.testing.assert_close(dense.eval()(ids).logits, expected.eval()(ids).logits, rtol=1e-4, atol=1e-4)
