"""Adapters of a fast model merge, and what comes of it is written, as with any model of PEFT's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, ModelError

IDS = torch.randint(4, 250, (2, 19), generator=torch.Generator().manual_seed(0))
PACKINGS = {"plain": {}, "fp8": {"load_in_fp8": True}, "nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}
MODELS = [
    ("llama", "plain"), ("qwen3", "plain"), ("phi3", "plain"), ("gpt2", "plain"),
    ("llama", "fp8"), ("qwen2", "fp8"), ("llama", "nf4"), ("gpt2", "nf4"), ("llama", "int8"), ("gpt2", "int8"),
]  # fmt: skip

TinyModel = Callable[..., Path]


def model_over(folder: Path, packing: str) -> Any:
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), device_map="cpu", dtype=torch.float32, **PACKINGS[packing]
    )
    return model


def trained_over(folder: Path, packing: str) -> Any:
    """With adapters that change something."""
    model = FastLanguageModel.get_peft_model(model_over(folder, packing), r=4, lora_alpha=8)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


ROUNDED = {"plain": 1e-5, "nf4": 1e-5, "int8": 1e-5, "fp8": 0.2}
"""Products over fp8 round what they multiply, in so narrow a model by much; a merged, plain model does not."""


@pytest.mark.parametrize(("family", "packing"), MODELS)
def test_a_merged_model_is_a_plain_one(tiny_model: TinyModel, tmp_path: Path, family: str, packing: str) -> None:
    model = trained_over(tiny_model(family), packing)
    wanted = logits(model)
    with model.disable_adapter():
        assert apart(logits(model), wanted) > 0.1
    merged = model.merge_and_unload()
    assert apart(logits(merged), wanted) <= ROUNDED[packing]
    merged.save_pretrained(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert apart(logits(read), logits(merged)) <= (1e-5 if packing != "fp8" else ROUNDED[packing])  # the head
    assert read.config.architectures == merged.config.architectures


@pytest.mark.parametrize(("family", "packing"), MODELS)
def test_a_base_without_adapters_is_written_as_packing_left_it(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, packing: str
) -> None:
    model = model_over(tiny_model(family), packing)
    with caplog.at_level(logging.WARNING, "pantheraml"):
        model.save_pretrained(tmp_path)
    assert (f"packed in {packing}" in caplog.text) == (packing != "plain")
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert apart(logits(read), logits(model)) <= ROUNDED[packing]


def test_weights_of_fp8_are_written_to_the_last_bit(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = trained_over(tiny_model("llama"), "fp8")
    layers = {name: layer for name, layer in model.get_base_model().named_modules() if isinstance(layer, LoraLayer)}
    assert layers
    wanted = {}
    for name, layer in layers.items():
        base: Any = layer.get_base_layer()
        dense = base.qweight.float() * base.scale[:, None]
        wanted[f"{name}.weight"] = dense + layer.get_delta_weight("default")
    model.merge_and_unload().save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for name, weight in wanted.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("packing", ["fp8", "nf4", "int8"])
def test_what_is_merged_can_be_unmerged(tiny_model: TinyModel, packing: str) -> None:
    model = trained_over(tiny_model("llama"), packing)
    wanted = logits(model)
    model.merge_adapter()
    assert apart(logits(model), wanted) <= ROUNDED[packing]
    model.unmerge_adapter()
    assert apart(logits(model), wanted) <= 1e-5
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("why", ["nothing is asked for", "it is not finite"])
def test_a_merge_that_does_not_happen_leaves_packed_layers(tiny_model: TinyModel, why: str) -> None:
    model = trained_over(tiny_model("llama"), "nf4")
    before = [type(module) for module in model.modules()]
    if why == "nothing is asked for":
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


@pytest.mark.parametrize("packing", ["fp8", "nf4", "int8"])
def test_dora_over_packed_weights_is_refused(tiny_model: TinyModel, packing: str) -> None:
    with pytest.raises(ConfigError, match=f"plain weights, and this model's are in {packing}"):
        FastLanguageModel.get_peft_model(model_over(tiny_model("llama"), packing), use_dora=True)


def test_a_model_with_adapters_gets_no_second_ones(tiny_model: TinyModel) -> None:
    model = trained_over(tiny_model("llama"), "plain")
    for each in (model, model.get_base_model()):
        with pytest.raises(ConfigError, match="has adapters already"):
            FastLanguageModel.get_peft_model(each)
    again = FastLanguageModel.get_peft_model(model.unload(), r=2)
    assert again(input_ids=IDS, labels=IDS).loss > 0


def test_an_adapter_is_not_a_model(tiny_model: TinyModel, tmp_path: Path) -> None:
    trained_over(tiny_model("llama"), "plain").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json") as caught:
        FastLanguageModel.from_pretrained(str(tmp_path), device_map="cpu")
    assert "adapter" in str(caught.value.todo)


@pytest.mark.parametrize(
    ("arguments", "said"), [({"token": "hf_secret"}, "support token"), ({"max_seq_length": "512"}, "'512'")]
)
def test_arguments_that_nobody_can_honour(tiny_model: TinyModel, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="cpu", **arguments)
    assert "secret" not in str(caught.value)
