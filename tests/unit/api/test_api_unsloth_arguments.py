"""Names and arguments of Unsloth scripts: honored, or one warning each."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    FalconH1Config,
)

import pantheraml
from pantheraml import FastLanguageModel, FastModel, FastVisionModel, PatchDPOTrainer, is_bfloat16_supported
from pantheraml.base.errors import ConfigError, ModelError, UnsupportedModelError
from pantheraml.data.vision_collator import UnslothVisionDataCollator
from pantheraml.models.loader import load_tokenizer
from pantheraml.specs.train import ModelConfig
from tests import toy
from tests.unit.models.conftest import TinyModel

UNUSED: dict[str, Any] = {
    "max_lora_rank": 32, "gpu_memory_utilization": 0.9, "float8_kv_cache": True, "disable_log_stats": True,
    "offload_embedding": True, "attn_implementation": "eager", "unsloth_force_compile": True,
    "unsloth_tiled_mlp": True, "device_map_planner_kwargs": {"retained_rows": 8},
}  # fmt: skip


def load(folder: Path, **arguments: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(folder), device_map="cpu", **arguments)[0]


def adapted_layers(model: Any) -> set[str]:
    return {name.split(".")[-4] for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_names(caplog: pytest.LogCaptureFixture) -> None:
    names = {"FastModel", "FastVisionModel", "PatchDPOTrainer", "get_chat_template", "is_bf16_supported"}
    assert names <= set(dir(pantheraml))
    assert all(callable(getattr(pantheraml, name)) for name in names)
    with caplog.at_level(logging.INFO, logger="pantheraml"):
        PatchDPOTrainer()
        pantheraml.PatchKTOTrainer()
        pantheraml.PatchFastRL("GRPO", FastLanguageModel)
    for name in ("PatchDPOTrainer", "PatchKTOTrainer", "PatchFastRL"):
        assert caplog.text.count(f"{name} does nothing") == 1
    assert pantheraml.vLLMSamplingParams(min_p=0.1, seed=1) == pantheraml.SamplingParams(min_p=0.1, seed=1)
    assert pantheraml.UnslothVisionDataCollator is UnslothVisionDataCollator


@pytest.mark.parametrize("name", ["FastSentenceTransformer", "launch_openenv"])
def test_names_that_are_not_supported_say_so(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"does not support {name}, which is for"):
        getattr(pantheraml, name)
    assert name not in dir(pantheraml)


def test_synthetic_data_kit_is_not_supported() -> None:
    with pytest.raises(ConfigError, match=r"(?s)does not support SyntheticDataKit.*synthetic-data-kit itself"):
        from pantheraml.dataprep import SyntheticDataKit  # noqa: F401
    with pytest.raises(ImportError):
        from pantheraml.dataprep import Another  # noqa: F401


@pytest.mark.parametrize("loader", [FastLanguageModel, FastVisionModel, FastModel])
def test_other_kinds_of_models_say_so_before_their_arguments(loader: Any) -> None:
    """Speech models, and model code of the checkpoint."""
    for kind in (AutoModelForSpeechSeq2Seq, AutoModel):
        with pytest.raises(ConfigError, match=f"does not support auto_model={kind.__name__}"):
            loader.from_pretrained("no-such-folder", auto_model=kind)


@pytest.mark.parametrize(("capability", "supported"), [((7, 5), False), ((8, 0), True), (None, True)])
def test_bfloat16(monkeypatch: pytest.MonkeyPatch, capability: Any, supported: bool) -> None:
    """On a CPU too: scripts pass `fp16=not is_bfloat16_supported()`, and fp16 needs a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert is_bfloat16_supported() is supported


def test_each_argument_without_effect_is_one_warning(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    model = load(tiny_model("llama"), **UNUSED)
    for name in UNUSED:
        assert caplog.text.count(f"{name}={UNUSED[name]!r} has no effect: ") == 1
    caplog.clear()
    adapter: dict[str, Any] = {
        "temporary_location": "folder",
        "finetune_vision_layers": True,
        "finetune_audio_layers": True,
    }
    FastLanguageModel.get_peft_model(model, **adapter)
    assert caplog.text.count("has no effect") == len(adapter)


def test_values_that_ask_for_nothing_are_no_warning(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    model = load(
        tiny_model("llama"),
        offload_embedding=False,
        attn_implementation=None,
        fast_inference=False,
        auto_model=AutoModelForCausalLM,
        token=True,
        full_finetuning=False,
        load_in_16bit=True,
        fix_tokenizer=False,
    )
    FastLanguageModel.get_peft_model(
        model,
        target_modules=None,
        finetune_vision_layers=False,
        finetune_language_layers=True,
        finetune_attention_modules=True,
        finetune_mlp_modules=True,
        task_type=TaskType.CAUSAL_LM,
    )
    assert not [record for record in caplog.records if record.name.startswith("pantheraml")]


def test_adapters_over_full_finetuning_have_no_effect(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    """As with Unsloth: scripts that ask for both train every weight."""
    model = load(tiny_model("llama"), full_finetuning=True)
    for loader in (FastLanguageModel, FastModel):
        assert loader.get_peft_model(model, target_modules=["no_such_layer"]) is model
    assert caplog.text.count("get_peft_model has no effect") == 2
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_load_in_16bit_is_not_quantized(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheraml.api.language_model.default_fp8", lambda device, split: "fp8")
    dense = {type(layer).__name__ for layer in load(tiny_model("llama"), load_in_16bit=True).modules()}
    assert "FP8Linear" not in dense
    assert "FP8Linear" in {type(layer).__name__ for layer in load(tiny_model("llama")).modules()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtype_auto_is_the_checkpoint_s(tiny_model: TinyModel, tmp_path: Path, dtype: torch.dtype) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=dtype).save_pretrained(tmp_path)
    toy.write_tokenizer(tmp_path)
    assert load(tmp_path, dtype="auto").dtype == dtype


def test_torch_dtype_is_dtype(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tiny_model("llama"), torch_dtype=torch.bfloat16).dtype == torch.bfloat16
    assert caplog.text.count("torch_dtype is called dtype") == 1
    with pytest.raises(ConfigError, match="disagree"):
        load(tiny_model("llama"), torch_dtype=torch.bfloat16, dtype=torch.float32)


def test_device_map_unsloth(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="unsloth")
    assert caplog.text.count('device_map="unsloth" is read as "balanced"') == 1
    balanced, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map="balanced")
    assert model.device == balanced.device


def test_the_token_is_used_for_downloads_only(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load_and_look(config: ModelConfig) -> Any:
        seen.append(os.environ.get("HF_TOKEN"))
        return load_tokenizer(config)

    monkeypatch.setattr("pantheraml.api.loading_options.load_tokenizer", load_and_look)
    monkeypatch.setenv("HF_TOKEN", "mine")
    load(tiny_model("llama"), token="given")
    load(tiny_model("llama"), token=None)
    assert seen == ["given", "mine"]
    assert os.environ["HF_TOKEN"] == "mine"


def test_checkpointing_of_from_pretrained_is_the_default_of_adapters(tiny_model: TinyModel) -> None:
    loaded = {"use_gradient_checkpointing": "unsloth"}
    asked = FastLanguageModel.get_peft_model(load(tiny_model("llama"), **loaded), r=2)
    overridden = FastLanguageModel.get_peft_model(
        load(tiny_model("llama"), **loaded), r=2, use_gradient_checkpointing=False
    )
    unset = FastLanguageModel.get_peft_model(load(tiny_model("llama")), r=2)
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")  # as a trainer's peft_config
    by_peft = get_peft_model(load(tiny_model("llama"), **loaded), lora)
    assert [m.get_base_model()._checkpointing for m in (asked, by_peft)] == ["offload", "offload"]
    assert [m.is_gradient_checkpointing for m in (asked, overridden, unset)] == [True, False, False]


def test_max_seq_length_of_get_peft_model(tiny_model: TinyModel) -> None:
    adapted = FastLanguageModel.get_peft_model(load(tiny_model("llama"), max_seq_length=32), max_seq_length=16)
    assert adapted.get_base_model().max_seq_length == 16


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        ({"finetune_mlp_modules": False}, ATTENTION),
        ({"finetune_attention_modules": False}, MLP),
        ({"finetune_mlp_modules": False, "target_modules": ["q_proj", "up_proj"]}, {"q_proj"}),
        ({"target_modules": None}, ATTENTION | MLP),
    ],
)
def test_switched_off_parts(tiny_model: TinyModel, arguments: dict[str, Any], layers: set[str]) -> None:
    model = FastLanguageModel.get_peft_model(load(tiny_model("llama")), r=2, **arguments)
    assert adapted_layers(model) == layers
    assert model.peft_config["default"].target_modules == layers, "as short names, for other models of the family"


def test_targets_that_the_model_lacks(tiny_model: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    names = ["q_proj", "in_proj", "out_proj", "w1"]
    model = FastLanguageModel.get_peft_model(load(tiny_model("llama")), r=2, target_modules=names)
    assert adapted_layers(model) == {"q_proj"}
    assert caplog.text.count("does not have are ignored: in_proj, out_proj, w1 (it has down_proj, gate_proj,") == 1
    with pytest.raises(ModelError, match="in_proj, w1"):
        FastLanguageModel.get_peft_model(load(tiny_model("llama")), target_modules=["in_proj", "w1"])


def test_targets_that_kernels_bypass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT refuses them; a script that names them among others trains the others."""
    config = FalconH1Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, mamba_n_heads=4, mamba_d_head=8, mamba_d_ssm=32, mamba_d_state=4, mamba_n_groups=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    toy.write_tokenizer(tmp_path)
    model = FastLanguageModel.get_peft_model(load(tmp_path), r=2, target_modules=["q_proj", "in_proj", "out_proj"])
    assert adapted_layers(model) == {"q_proj", "in_proj"}
    assert caplog.text.count("Mamba's kernels bypass are ignored: out_proj") == 1
    with pytest.raises(UnsupportedModelError, match="out_proj"):
        FastLanguageModel.get_peft_model(load(tmp_path), target_modules=["out_proj"])
