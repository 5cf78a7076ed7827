"""RoPE scaling: as transformers computes it from an explicit config, before loading and after saving."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, ModelError, UnsupportedModelError
from pantheraml.models.loader import load_tokenizer
from pantheraml.models.rope_scaling import FILE, RopeChange, plan_rope
from pantheraml.specs.train import ModelConfig
from tests import toy_vision

IDS = torch.arange(3, 43)[None]
LONG = torch.arange(3, 123)[None]
"""More tokens than the 64 positions of the model."""
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits
    return result


def reference(folder: Path, rope: dict[str, Any], **changes: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, rope_parameters=rope, dtype=torch.float32, **changes)


def load(folder: Path, **arguments: Any) -> Any:
    return FastLanguageModel.from_pretrained(str(folder), **arguments)[0]


def test_longer_sequences_scale_rope_linearly(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_model("llama")
    with caplog.at_level(logging.WARNING, logger="pantheraml"):
        model, tokenizer = FastLanguageModel.from_pretrained(str(folder), max_seq_length=160)
    assert "RoPE is scaled linearly by a factor of 2.5" in caplog.text
    assert tokenizer.model_max_length == model.config.max_position_embeddings == model.max_seq_length == 160
    expected = reference(folder, {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0})
    for ids in (IDS, LONG):
        torch.testing.assert_close(logits(model, ids), logits(expected, ids))
    assert not torch.allclose(logits(model), logits(load(folder)), atol=1e-2)
    assert (
        len(model.fast_generate([LONG[0].tolist()], {"temperature": 0, "max_tokens": 3})[0].outputs[0].token_ids) == 3
    )


@pytest.mark.parametrize("rope", [LLAMA3, YARN, {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}])
def test_an_existing_factor_is_raised(tiny_model: Callable[..., Path], rope: dict[str, Any]) -> None:
    folder = tiny_model("llama", rope_parameters=dict(rope))
    model = load(folder, max_seq_length=128)
    expected = reference(folder, {**rope, "factor": rope["factor"] * 2})
    torch.testing.assert_close(logits(model, LONG), logits(expected, LONG))
    assert model.config.rope_parameters["factor"] == rope["factor"] * 2


def test_dynamic_rope_scales_itself(tiny_model: Callable[..., Path]) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = tiny_model("llama", rope_parameters=dict(rope))
    model = load(folder, max_seq_length=128)
    assert model.rope is None
    assert model.config.max_position_embeddings == 64
    torch.testing.assert_close(logits(model, LONG), logits(reference(folder, rope), LONG))


def test_requested_scaling(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("llama")
    for given in ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}):
        model = load(folder, rope_scaling=given, max_seq_length=100)
        expected = reference(folder, {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
        torch.testing.assert_close(logits(model, LONG), logits(expected, LONG))
        assert model.config.max_position_embeddings == 100
    yarn = load(folder, rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64})
    expected = reference(folder, {**YARN, "factor": 2.0, "original_max_position_embeddings": 64})
    torch.testing.assert_close(logits(yarn, LONG), logits(expected, LONG))
    for bad in ({"factor": 2.0}, {"rope_type": "nonsense", "factor": 2.0}, {"rope_type": "linear"}):
        with pytest.raises(ConfigError, match="rope_scaling"):
            load(folder, rope_scaling=bad)


def test_windowed_layers_keep_their_rope(tiny_model: Callable[..., Path]) -> None:
    sliding = {"rope_type": "default", "rope_theta": 10000.0}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    config = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).config
    config.rope_parameters = {"sliding_attention": sliding, "full_attention": full}
    change = plan_rope(config, 128)
    assert change is not None
    assert change.rope_parameters == {"sliding_attention": sliding, "full_attention": {**full, "factor": 16.0}}
    with pytest.raises(UnsupportedModelError, match="each type of layer"):
        plan_rope(config, None, {"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2_5_vl", "pixtral"])
def test_a_model_that_is_built_can_be_changed(tiny_model: Callable[..., Path], family: str, tmp_path: Path) -> None:
    """Text models, types of layers with a RoPE of their own, and text models inside vision-language models."""
    vision = family in toy_vision.FAMILIES
    folder = toy_vision.write(family, tmp_path) if vision else tiny_model(family)
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    change = plan_rope(config, 4 * config.get_text_config().max_position_embeddings)
    assert change is not None
    built = kind.from_pretrained(folder, dtype=torch.float32)
    before = logits(built)
    change.apply(config)
    assert change.apply_to_built(built) == 1
    assert torch.equal(logits(built), logits(kind.from_pretrained(folder, config=config, dtype=torch.float32)))
    assert not torch.allclose(logits(built), before, atol=1e-4)


def test_models_without_scalable_rope_keep_the_error(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="64 positions that the model supports, and it has no RoPE"):
        load(tiny_model("gpt2"), max_seq_length=65)
    config = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).config
    config.rope_parameters = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    with pytest.raises(UnsupportedModelError, match=r"RoPE \(longrope\) cannot be scaled"):
        plan_rope(config, 128)
    with pytest.raises(ConfigError, match="positive integer"):
        plan_rope(config, 0)


def test_saved_adapters_and_models_keep_the_scaling(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_model("llama")
    model = FastLanguageModel.get_peft_model(load(folder, max_seq_length=128), r=2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = load(tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected)
    again.save_pretrained(tmp_path / "adapter-2")
    assert (tmp_path / "adapter-2" / FILE).read_text() == (tmp_path / "adapter" / FILE).read_text()
    torch.testing.assert_close(logits(load(tmp_path / "adapter", max_seq_length=128)), expected)
    by_peft = PeftModel.from_pretrained(load(folder, max_seq_length=128), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(by_peft), expected, rtol=1e-4, atol=1e-4)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    load_tokenizer(ModelConfig(path=str(folder))).save_pretrained(tmp_path / "merged")
    for merged in (load(tmp_path / "merged"), AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        assert merged.config.max_position_embeddings == 128
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    plain = FastLanguageModel.get_peft_model(load(folder, max_seq_length=64), r=2)
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / FILE).exists()
    (tmp_path / "adapter" / FILE).write_text(json.dumps({"rope_parameters": 3}))
    with pytest.raises(ModelError, match="corrupted"):
        load(tmp_path / "adapter")


def test_a_length_after_loading_cannot_scale(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="pass 65 to from_pretrained"):
        FastLanguageModel.get_peft_model(load(tiny_model("llama")), max_seq_length=65)


def test_a_change_is_read_as_written(tmp_path: Path) -> None:
    change = RopeChange({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 128)
    change.write(tmp_path)
    assert RopeChange.read(tmp_path) == change
