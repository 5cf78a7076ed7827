"""Saving methods of fast models: what they write is what was trained, and the model can be trained on."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, DeviceError, ModelError
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.saving import merged_tensors
from pantheraml.models.saving.merged_folder import write_merged
from tests.unit.models.conftest import COMMON, byte_tokenizer

IDS = torch.randint(4, 250, (2, 19), generator=torch.Generator().manual_seed(0))
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {}, "fp8": {"load_in_fp8": True}, "nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True},
}  # fmt: skip
MODELS = [
    ("llama", "plain"), ("qwen3", "plain"), ("phi3", "plain"), ("gpt2", "plain"), ("gemma2", "plain"),
    ("llama", "fp8"), ("llama", "nf4"), ("gpt2", "nf4"), ("llama", "int8"), ("gpt2", "int8"),
]  # fmt: skip

TinyModel = Callable[..., Path]


def loaded(folder: Path, quant_format: str = "plain", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), device_map="cpu", dtype=dtype, **FORMATS[quant_format])


def with_effect(model: Any) -> Any:
    """Give the adapters an effect."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def adapted(folder: Path, quant_format: str = "plain", dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    model, tokenizer = loaded(folder, quant_format, dtype)
    return with_effect(FastLanguageModel.get_peft_model(model, r=4, lora_alpha=8, **settings)), tokenizer


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model.eval()(input_ids=IDS).logits
    return actual.float()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("family", "quant_format"), MODELS)
def test_merged_tensors_are_exactly_the_trained_ones(
    tiny_model: TinyModel, tmp_path: Path, family: str, quant_format: str
) -> None:
    """In float32, where nothing rounds; fp8 matmuls round their inputs, which a merged model does not."""
    model, tokenizer = adapted(tiny_model(family), quant_format)
    expected = logits(model)
    write_merged(model.get_base_model(), tmp_path, tokenizer, dtype=torch.float32)
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert relative_error(logits(read), expected) <= (0.2 if quant_format == "fp8" else 1e-5)
    assert torch.equal(logits(model), expected), "the model itself is as before"
    merged = model.merge_and_unload()
    for name, tensor in read.state_dict().items():
        if "lm_head" not in name or quant_format != "fp8":
            torch.testing.assert_close(tensor, merged.state_dict()[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("quant_format", ["plain", "nf4"])
def test_merged_16bit(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, quant_format: str
) -> None:
    model, tokenizer = adapted(tiny_model("llama"), quant_format, torch.bfloat16)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "pantheraml"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer, save_method="merged_16bit")
    assert ("merged into the dequantized nf4 weights" in caplog.text) == (quant_format == "nf4")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_" in name)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.dtype == torch.bfloat16
    assert relative_error(logits(read), logits(model)) <= 0.03
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["use_cache"] is True
    saved = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved("12 ü")["input_ids"] == tokenizer("12 ü")["input_ids"]


@pytest.mark.parametrize("quant_format", ["plain", "nf4"])
def test_adapters_are_merged_and_saved_in_fp16_on_a_cpu(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, quant_format: str
) -> None:
    """Trained in float32; loaded in fp16 to generate and to be saved, but not to be trained, by a loop or a trainer."""
    trained, tokenizer = adapted(tiny_model("llama"), quant_format)
    trained.save_lora(tmp_path / "adapter")
    with caplog.at_level(logging.WARNING, "pantheraml"):
        model, _ = loaded(tmp_path / "adapter", quant_format, torch.float16)
    assert "fp16 on a CPU" in caplog.text
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}
    expected = logits(trained)
    assert relative_error(logits(model), expected) <= 0.005
    assert relative_error(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected) <= 0.005
    base, _ = loaded(tiny_model("llama"), quant_format, torch.float16)
    with pytest.raises(DeviceError, match=r"fp16 training needs a GPU(?s:.*)torch\.float32"):
        FastLanguageModel.get_peft_model(base)
    trainer = Trainer(model=model, args=TrainingArguments(str(tmp_path / "run"), use_cpu=True), train_dataset=[])
    with pytest.raises(DeviceError, match="fp16 training needs a GPU"):
        trainer.train()


def test_fp16_weights_are_not_finetuned_on_a_cpu(tiny_model: TinyModel) -> None:
    with pytest.raises(DeviceError, match="fp16 needs a GPU"):
        FastLanguageModel.from_pretrained(str(tiny_model("llama")), dtype="float16", full_finetuning=True)


def test_float32_models_are_saved_in_bf16(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model("llama"))
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_models_without_adapters_are_saved_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, tokenizer = loaded(tiny_model("qwen3"), dtype=torch.bfloat16)
    model.save_pretrained_merged(tmp_path / "out", tokenizer, save_method=None)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_shards_have_an_index(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model("llama"), dtype=torch.bfloat16)
    out = tmp_path / "out"
    model.save_pretrained_merged(out, tokenizer, max_shard_size="8KB")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == set(shards)
    tensors = {name: tensor for shard in shards for name, tensor in load_file(out / shard).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(tensors) == set(index["weight_map"])
    assert relative_error(logits(AutoModelForCausalLM.from_pretrained(out)), logits(model)) <= 0.03
    model.save_pretrained_merged(out, tokenizer)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"], "of the earlier save nothing"


def test_one_merged_weight_is_in_memory_at_a_time(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = adapted(tiny_model("llama"), "nf4")
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    original = merged_tensors.merged_layer

    def counted(layer: Any, name: str) -> Any:
        nonlocal most
        made = original(layer, name)
        alive.append(weakref.ref(made.weight))
        most = max(most, sum(reference() is not None for reference in alive))
        return made

    monkeypatch.setattr(merged_tensors, "merged_layer", counted)
    model.save_pretrained_merged(tmp_path / "out", tokenizer)
    assert len(alive) == 14
    assert most == 1


def test_other_files_in_the_folder_stay(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model("llama"))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-6").mkdir()
    model.save_pretrained_merged(tmp_path, tokenizer)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "checkpoint-6").is_dir()
    with pytest.raises(ConfigError, match="already holds a model"):
        model.save_lora(tmp_path)
    model.save_lora(tmp_path / "lora")
    with pytest.raises(ConfigError, match="already holds an adapter"):
        model.save_pretrained_merged(tmp_path / "lora", tokenizer)


def test_a_failed_save_leaves_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model("llama"), "nf4")
    next(p for name, p in model.named_parameters() if "lora_B" in name).data.fill_(torch.nan)
    with pytest.raises(ModelError, match="cannot be merged"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("save_method", ["merged_4bit", "merged_4bit_forced"])
def test_merged_4bit_is_nf4_of_the_merged_weights(tiny_model: TinyModel, tmp_path: Path, save_method: str) -> None:
    model, tokenizer = adapted(tiny_model("llama"), "nf4", torch.bfloat16)
    model.save_pretrained_merged(tmp_path / "out", tokenizer, save_method=save_method)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"
    read, _ = loaded(tmp_path / "out", "nf4")
    merged = model.merge_and_unload()
    layers = {name: layer for name, layer in read.named_modules() if isinstance(layer, NF4Linear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        dense = merged.get_submodule(name).weight.float()
        assert relative_error(layer.dequantize(), dense) < 0.12, name
        assert relative_error(layer.dequantize(), dense) > 0.02, "it is rounded"


def test_lora_is_what_plain_peft_loads(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama")
    model, tokenizer = adapted(folder, use_rslora=True)
    model.save_lora(tmp_path / "lora")
    model.save_pretrained_merged(tmp_path / "method", tokenizer, save_method="lora")
    for saved in (tmp_path / "lora", tmp_path / "method"):
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(saved))
        assert relative_error(logits(plain), logits(model)) <= 1e-5
    assert (tmp_path / "method" / "tokenizer.json").is_file()
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder)
    assert config["inference_mode"] is True
    assert model.peft_config["default"].inference_mode is False
    again, _ = loaded(tmp_path / "lora")
    assert relative_error(logits(again), logits(model)) <= 1e-5
    request = model.load_lora(tmp_path / "lora")
    assert (request.path, request.name) == (str(tmp_path / "lora"), "lora")


def test_a_base_has_no_adapters_to_save(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, _ = loaded(tiny_model("llama"))
    with pytest.raises(ConfigError, match="no adapters"):
        model.save_lora(tmp_path / "lora")
    with pytest.raises(ConfigError, match="no adapter in"):
        model.load_lora(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_trained_copies_of_embedding_and_head_are_saved(tiny_model: TinyModel, tmp_path: Path, tied: bool) -> None:
    """`modules_to_save` of plain PEFT; of a tied pair each has its own weights then."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model("llama", tie_word_embeddings=tied))
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    with pytest.warns(UserWarning, match="ensure_weight_tying") if tied else nullcontext():
        model = with_effect(get_peft_model(base, config))
    head = model.get_base_model().lm_head.modules_to_save["default"]
    nn.init.normal_(head.weight, std=0.3)
    expected = logits(model)
    write_merged(model.get_base_model(), tmp_path, dtype=torch.float32)
    assert relative_error(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected) <= 1e-5


def test_experts_are_saved_under_the_names_of_checkpoints(tmp_path: Path) -> None:
    """transformers joins the experts of a mixture to one tensor, and its checkpoints have one per expert."""
    sizes = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes)).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    assert any(".experts.3." in name for name in names)
    model, tokenizer = loaded(tmp_path / "model")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    peft_model: Any = with_effect(FastLanguageModel.get_peft_model(model, r=4, target_modules=targets))
    write_merged(peft_model.get_base_model(), tmp_path, tokenizer, dtype=torch.float32)
    assert set(load_file(tmp_path / "model.safetensors")) == names
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert relative_error(logits(read), logits(peft_model)) <= 1e-5


def test_bad_arguments(tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = adapted(tiny_model("llama"))
    with pytest.raises(ConfigError, match="'mxfp4' is not supported"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer, save_method="mxfp4")
    with pytest.raises(ConfigError, match="'2bit' is not supported") as caught:
        model.save_pretrained_merged(tmp_path / "out", tokenizer, save_method="2bit")
    assert "merged_16bit" in str(caught.value)
    with pytest.raises(ConfigError, match="no argument 'savemethod'"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer, savemethod="lora")
    with pytest.raises(ConfigError, match="not a size"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer, max_shard_size="big")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    with caplog.at_level(logging.WARNING, "pantheraml"):
        model.save_pretrained_merged(tmp_path / "out", tokenizer, maximum_memory_usage=0.75)
    assert "maximum_memory_usage=0.75 has no effect" in caplog.text
