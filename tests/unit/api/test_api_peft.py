"""PEFT's own functions over our models, as `peft_config=` of TRL's trainers and people use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, set_seed

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.hooks import peft as peft_hooks
from pantheraml.models.fast import is_fused
from tests import toy
from tests.unit.api.test_api_trl_trainers import (
    _trainers_write_to_the_environment,
    assert_same_training,
    assert_trains,
    fast_model,
    folder,
    loaded,
    lora,
    make_trainer,
)

__all__ = ["_trainers_write_to_the_environment", "folder"]

FORMATS = {"load_in_4bit": "nf4", "load_in_8bit": "int8", "load_in_fp8": "fp8"}
IDS = torch.arange(2, 22)[None]


def fused_layers(model: Any) -> int:
    return sum(is_fused(layer) for layer in model.modules())


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "grpo"])
def test_peft_config_of_a_trainer(folder: Path, tmp_path: Path, kind: str) -> None:
    runs = []
    for name in ("fast", "plain"):
        model = loaded(folder) if name == "fast" else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        set_seed(1)  # of the adapter's initial values
        runs.append(make_trainer(kind, model, folder, tmp_path / name, peft_config=lora()))
    assert fused_layers(runs[0].model) == 2
    assert_same_training(*runs)


@pytest.mark.seed("S3-041")
@pytest.mark.parametrize("option", FORMATS)
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_peft_config_over_quantized_weights(folder: Path, tmp_path: Path, kind: str, option: str) -> None:
    model = loaded(folder, **{option: True})
    run = make_trainer(kind, model, folder, tmp_path, peft_config=lora())
    assert fused_layers(run.model) == (2 if option == "load_in_fp8" else 0)
    assert type(run.model) is type(fast_model(folder, **{option: True}))
    assert_trains(run)


@pytest.mark.parametrize("option", FORMATS)
def test_peft_over_quantized_weights_is_our_own(folder: Path, option: str) -> None:
    """Same adapted layers, same initial values as PEFT draws them, in float32, and the same output."""
    ours = fast_model(folder, **{option: True})
    theirs = get_peft_model(loaded(folder, **{option: True}), lora(target_modules="all-linear"))
    assert get_peft_model_state_dict(theirs).keys() == get_peft_model_state_dict(ours).keys()
    assert {p.dtype for p in theirs.parameters() if p.requires_grad} == {torch.float32}
    copy_adapter(ours, theirs)
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    set_seed(1)
    quantized = get_peft_model(loaded(folder, **{option: True}), lora())
    set_seed(1)
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora())
    drawn, expected = get_peft_model_state_dict(quantized), get_peft_model_state_dict(plain)
    assert all(torch.equal(drawn[name], tensor) for name, tensor in expected.items())


def copy_adapter(source: Any, target: Any) -> None:
    values: dict[str, Tensor] = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(values[name].data)


def test_a_config_can_be_used_twice(folder: Path) -> None:
    config = lora()
    for _ in range(2):
        assert fused_layers(get_peft_model(loaded(folder, load_in_fp8=True), config)) == 2


def test_our_get_peft_model_keeps_its_checkpointing(folder: Path) -> None:
    fast = fast_model(folder, checkpointing=True, load_in_fp8=True)
    assert fused_layers(fast) == 2
    assert fast.get_base_model().is_gradient_checkpointing


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"use_dora": True}, "use_dora"), ({"init_lora_weights": "pissa"}, "pissa"), ({"bias": "all"}, "bias")],
)
def test_settings_that_need_plain_weights(folder: Path, changes: dict[str, Any], words: str) -> None:
    model = loaded(folder, load_in_4bit=True)
    with pytest.raises(ConfigError, match=words) as caught:
        get_peft_model(model, lora(**changes))
    assert "nf4" in str(caught.value)
    assert not any("lora_" in name for name, _ in model.named_modules())


def test_other_models_are_left_alone(folder: Path) -> None:
    loaded(folder)  # applies the hooks
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), lora())
    assert not fused_layers(plain)
    assert type(plain).__module__ == "peft.peft_model"


def test_the_hooks_can_be_reverted(folder: Path) -> None:
    model = loaded(folder)
    quantized = loaded(folder, load_in_4bit=True)
    peft_hooks.revert()
    assert not fused_layers(get_peft_model(model, lora()))
    with pytest.raises(ValueError, match=r"not supported|No modules"):
        get_peft_model(quantized, lora())
    peft_hooks.apply()


def trained_adapter(folder: Path, output: Path, **loading: Any) -> Any:
    """Return a trained model, saved to `output` by its trainer."""
    run = make_trainer("sft", fast_model(folder, **loading), folder, output / "run")
    run.train()
    run.save_model(str(output))
    return run.model.eval()


@pytest.mark.seed("S3-042")
@pytest.mark.parametrize("option", [None, *FORMATS])
@pytest.mark.parametrize("way", ["FastLanguageModel", "PEFT", "PEFT to train"])
def test_reloading_an_adapter(folder: Path, tmp_path: Path, option: str | None, way: str) -> None:
    loading = {} if option is None else {option: True}
    before = trained_adapter(folder, tmp_path, **loading)
    if way == "FastLanguageModel":
        again: Any = loaded(tmp_path, **loading)
    else:
        again = PeftModel.from_pretrained(loaded(folder, **loading), tmp_path, is_trainable=way == "PEFT to train")
    saved = get_peft_model_state_dict(again)
    assert all(torch.equal(saved[name], tensor) for name, tensor in get_peft_model_state_dict(before).items())
    with torch.no_grad():
        after, expected = (model.eval()(IDS, use_cache=False).logits for model in (again, before))
    if option == "load_in_fp8" and way == "PEFT":  # to generate with it: neither fused nor with an fp8 head
        assert torch.cosine_similarity(after.flatten(), expected.flatten(), dim=0) > 0.98
    else:
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
    if way == "PEFT":
        return
    assert fused_layers(again) == fused_layers(before)
    assert {p.dtype for p in again.parameters() if p.requires_grad} == {torch.float32}
    assert_trains(make_trainer("sft", again, folder, tmp_path / "more"))


def test_an_adapter_folder_brings_its_tokenizer_and_settings(folder: Path, tmp_path: Path) -> None:
    trained_adapter(folder, tmp_path)
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(tmp_path), device_map="cpu", max_seq_length=64, use_gradient_checkpointing="selective"
    )
    assert model.is_gradient_checkpointing
    assert model.peft_config["default"].r == 4
    assert model.peft_config["default"].base_model_name_or_path == str(folder)
    assert tokenizer.model_max_length == 64
    assert tokenizer.name_or_path == str(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    _, tokenizer = FastLanguageModel.from_pretrained(str(tmp_path), device_map="cpu")
    assert tokenizer.name_or_path == str(folder)


def test_adapter_folders_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    trained_adapter(folder, tmp_path)
    with pytest.raises(ConfigError, match="full_finetuning"):
        loaded(tmp_path, full_finetuning=True)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    other = toy.write_llama(tmp_path / "other", hidden_size=32)
    file.write_text(json.dumps({**config, "base_model_name_or_path": str(other)}))
    with pytest.raises(ModelError, match="does not fit its base model"):
        loaded(tmp_path)
    file.write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="does not name its base model"):
        loaded(tmp_path)
