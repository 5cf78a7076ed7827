"""Adapters of a fast model merge and save like those of any PEFT model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError

IDS = torch.randint(4, 250, (2, 19), generator=torch.Generator().manual_seed(0))
FORMATS = {"plain": {}, "fp8": {"load_in_fp8": True}, "nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}
MODELS = [
    ("llama", "plain"), ("qwen3", "plain"), ("phi3", "plain"), ("gpt2", "plain"),
    ("llama", "fp8"), ("qwen2", "fp8"), ("llama", "nf4"), ("gpt2", "nf4"), ("llama", "int8"), ("gpt2", "int8"),
]  # fmt: skip

TinyModel = Callable[..., Path]


def base_model(folder: Path, quant_format: str) -> Any:
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), device_map="cpu", dtype=torch.float32, **FORMATS[quant_format]
    )
    return model


def adapted_model(folder: Path, quant_format: str) -> Any:
    """Return a model with adapters that have an effect."""
    model = FastLanguageModel.get_peft_model(base_model(folder, quant_format), r=4, lora_alpha=8)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model.eval()(input_ids=IDS).logits
    return actual


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


TOLERANCE = {"plain": 1e-5, "nf4": 1e-5, "int8": 1e-5, "fp8": 0.2}
"""fp8 matmuls round their inputs, by much in so narrow a model; a merged, unquantized model does not."""


@pytest.mark.parametrize(("family", "quant_format"), MODELS)
def test_a_merged_model_is_a_plain_one(tiny_model: TinyModel, tmp_path: Path, family: str, quant_format: str) -> None:
    model = adapted_model(tiny_model(family), quant_format)
    expected = logits(model)
    with model.disable_adapter():
        assert relative_error(logits(model), expected) > 0.1
    merged = model.merge_and_unload()
    assert relative_error(logits(merged), expected) <= TOLERANCE[quant_format]
    merged.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert relative_error(logits(read), logits(merged)) <= (
        1e-5 if quant_format != "fp8" else TOLERANCE[quant_format]
    )  # the head
    assert read.config.architectures == merged.config.architectures


@pytest.mark.parametrize(("family", "quant_format"), MODELS)
def test_base_without_adapters_is_saved_as_quantized(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, quant_format: str
) -> None:
    model = base_model(tiny_model(family), quant_format)
    with caplog.at_level(logging.WARNING, "pantheraml"):
        model.save_pretrained(tmp_path)
    assert (f"quantized to {quant_format}" in caplog.text) == (quant_format != "plain")
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert relative_error(logits(read), logits(model)) <= TOLERANCE[quant_format]


def test_fp8_weights_are_saved_exactly(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = adapted_model(tiny_model("llama"), "fp8")
    layers = {name: layer for name, layer in model.get_base_model().named_modules() if isinstance(layer, LoraLayer)}
    assert layers
    expected = {}
    for name, layer in layers.items():
        base: Any = layer.get_base_layer()
        dense = base.qweight.float() * base.scale[:, None]
        expected[f"{name}.weight"] = dense + layer.get_delta_weight("default")
    model.merge_and_unload().save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for name, weight in expected.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("quant_format", ["fp8", "nf4", "int8"])
def test_merge_and_unmerge(tiny_model: TinyModel, quant_format: str) -> None:
    model = adapted_model(tiny_model("llama"), quant_format)
    expected = logits(model)
    model.merge_adapter()
    assert relative_error(logits(model), expected) <= TOLERANCE[quant_format]
    model.unmerge_adapter()
    assert relative_error(logits(model), expected) <= 1e-5
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("reason", ["no adapters", "not finite"])
def test_failed_merge_leaves_quantized_layers(tiny_model: TinyModel, reason: str) -> None:
    model = adapted_model(tiny_model("llama"), "nf4")
    before = [type(module) for module in model.modules()]
    if reason == "no adapters":
        model.merge_adapter(adapter_names=[])
    else:
        next(p for name, p in model.named_parameters() if "lora_B" in name).data.fill_(torch.nan)
        with pytest.raises(ValueError, match="NaNs"):
            model.merge_adapter(safe_merge=True)
    assert [type(module) for module in model.modules()] == before


def test_weights_in_bf16_stay_in_it(tiny_model: TinyModel) -> None:
    model, _ = FastLanguageModel.from_pretrained(
        str(tiny_model("llama")), device_map="cpu", dtype=torch.bfloat16, load_in_4bit=True
    )
    merged = FastLanguageModel.get_peft_model(model, r=4).merge_and_unload()
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    assert logits(merged).dtype == torch.bfloat16


@pytest.mark.parametrize("quant_format", ["fp8", "nf4", "int8"])
def test_dora_over_quantized_weights_raises(tiny_model: TinyModel, quant_format: str) -> None:
    with pytest.raises(ConfigError, match=f"unquantized weights, but this model's are in {quant_format}"):
        FastLanguageModel.get_peft_model(base_model(tiny_model("llama"), quant_format), use_dora=True)


def test_adding_adapters_twice_raises(tiny_model: TinyModel) -> None:
    model = adapted_model(tiny_model("llama"), "plain")
    for each in (model, model.get_base_model()):
        with pytest.raises(ConfigError, match="already has adapters"):
            FastLanguageModel.get_peft_model(each)
    again = FastLanguageModel.get_peft_model(model.unload(), r=2)
    assert again(input_ids=IDS, labels=IDS).loss > 0


def test_unsupported_arguments_raise(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="'512'") as caught:
        FastLanguageModel.from_pretrained(
            str(tiny_model("llama")), device_map="cpu", token="hf_secret", max_seq_length=cast(int, "512")
        )
    assert "secret" not in str(caught.value)
