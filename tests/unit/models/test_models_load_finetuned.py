"""Loading a fine-tuned model: with its base, or merged into one plain model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pantheraml.base.errors import ConfigError, ModelError, RunDirectoryError
from pantheraml.models import adapter_patterns
from pantheraml.models.adapters import (
    TrainedWeights,
    apply_method,
    base_quantization,
    save_trained,
    trainable_parameters,
)
from pantheraml.models.load_finetuned import export_merged, load_finetuned_model, load_to_merge
from pantheraml.models.loader import load_model, load_tokenizer, read_config
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_folder import quantized_config
from pantheraml.specs.train import MethodConfig, ModelConfig

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2"]
METHODS = {
    "lora": MethodConfig(kind="lora", rank=3),
    "dora": MethodConfig(kind="dora", rank=3),
    "rslora": MethodConfig(kind="lora", rank=3, rslora=True),
    "qlora": MethodConfig(kind="qlora", rank=3),
    "full": MethodConfig(kind="full"),
}
HERE: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
IDS = torch.arange(24).view(2, 12) * 7


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def train(base: Path, method: MethodConfig, path: Path) -> tuple[ModelConfig, torch.Tensor]:
    """Train and save in `path`; return the config and the logits."""
    config = ModelConfig(path=str(base))
    model = apply_method(load_model(config, **HERE, quantize=base_quantization(config, method)), method, seed=0)
    generator = torch.Generator().manual_seed(3)
    for _, parameter in trainable_parameters(model):
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    save_trained(TrainedWeights.of(model), path, method=method, model_config=config, tokenizer=load_tokenizer(config))
    return config, logits(model)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_and_exported_models_match_training(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, name: str
) -> None:
    method = METHODS[name]
    config, expected = train(tiny_model(family), method, tmp_path / "trained")
    model = load_finetuned_model(config, method, tmp_path / "trained", **HERE)
    torch.testing.assert_close(logits(model), expected)
    assert any(isinstance(m, NF4Linear) for m in model.modules()) is (name == "qlora")

    export_merged(config, method, tmp_path / "trained", **HERE, output=tmp_path / "merged")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(merged) is type(AutoModelForCausalLM.from_pretrained(config.path))
    assert merged.config.use_cache is True
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    saved, own = AutoTokenizer.from_pretrained(tmp_path / "merged"), load_tokenizer(config)
    assert saved("12 + 3 = ü")["input_ids"] == own("12 + 3 = ü")["input_ids"]


def test_merging_keeps_the_requested_dtype(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    config, expected = train(tiny_model("llama"), METHODS["qlora"], tmp_path / "trained")
    target = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "output": tmp_path / "merged"}
    export_merged(config, METHODS["qlora"], tmp_path / "trained", **target)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert float((logits(model).float() - expected).abs().max() / expected.abs().max()) < 0.05


def test_export_rejects_a_non_empty_folder(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    config, _ = train(tiny_model("llama"), METHODS["lora"], tmp_path / "trained")
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep me")
    with pytest.raises(RunDirectoryError, match="not an empty folder"):
        export_merged(config, METHODS["lora"], tmp_path / "trained", **HERE, output=output)
    assert [file.name for file in output.iterdir()] == ["mine.txt"]
    (output / "mine.txt").unlink()
    export_merged(config, METHODS["lora"], tmp_path / "trained", **HERE, output=output)
    assert (output / "model.safetensors").is_file()


def test_an_adapter_of_another_base_is_rejected(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    train(tiny_model("llama"), METHODS["lora"], tmp_path / "trained")
    others = [tiny_model("gpt2"), tiny_model("llama", num_hidden_layers=1), tiny_model("llama", intermediate_size=64)]
    for other in others:
        with pytest.raises(ModelError, match="does not fit"):
            load_finetuned_model(ModelConfig(path=str(other)), METHODS["lora"], tmp_path / "trained", **HERE)


ENDLESS = r"([\w.]+\w*)+!"
BAD_CONFIGS: dict[str, tuple[Any, str]] = {
    "terabytes": ({"r": 100_000_000}, "has rank 100000000, but its largest weight has rank 3"),
    "terabytes of a layer": ({"rank_pattern": {"q_proj": 1 << 40}}, "has rank 1099511627776"),
    "new layers": ({"layer_replication": [[0, 2]] * 10_000}, "layer_replication: Input should be None"),
    "another kind": ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}, "only LoRA adapters are supported"),
    "words": ({"r": "x"}, "r: Input should be a valid integer"),
    "numbers": ({"target_modules": 5}, "target_modules"),
    "a broken pattern": ({"target_modules": "(q_proj"}, "does not fit its base model"),
    "a pattern without an end": ({"target_modules": ENDLESS}, "take longer than 1 s to match"),
    "an exception without an end": ({"exclude_modules": ENDLESS}, "take longer than 1 s to match"),
    "a scale without an end": ({"alpha_pattern": {ENDLESS: 2}}, "take longer than 1 s to match"),
    "a module without an end": ({"modules_to_save": [ENDLESS]}, "modules_to_save of the adapter has a regular"),
    "a layer without an end": (
        {"layers_pattern": ENDLESS, "layers_to_transform": [0]},
        "layers_pattern of the adapter has a regular",
    ),
    "many scales": ({"alpha_pattern": {str(i): 2 for i in range(30_000)}}, "at most 20000 items"),
    "none": ([], "cannot be used"),
    "deep": ("[" * 100_000, "is not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
@pytest.mark.timeout(60)
def test_an_adapter_config_of_someone_else_is_bounded(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_patterns, "SECONDS", 1.0)
    change, problem = BAD_CONFIGS[name]
    config, _ = train(tiny_model("llama"), METHODS["lora"], tmp_path / "trained")
    path = tmp_path / "trained" / "adapter_config.json"
    values = json.loads(path.read_text())
    text = change if isinstance(change, str) else json.dumps(values | change if isinstance(change, dict) else change)
    path.write_text(text)
    with pytest.raises(ModelError, match=re.escape(problem)):
        load_finetuned_model(config, METHODS["lora"], tmp_path / "trained", **HERE)


def test_a_missing_or_corrupted_adapter_is_reported(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    config, _ = train(tiny_model("llama"), METHODS["lora"], tmp_path / "trained")
    with pytest.raises(ModelError, match="no adapter"):
        load_finetuned_model(config, METHODS["lora"], tmp_path, **HERE)
    weights = tmp_path / "trained" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="corrupted"):
        load_finetuned_model(config, METHODS["lora"], tmp_path / "trained", **HERE)
    (tmp_path / "trained" / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="corrupted"):
        load_finetuned_model(config, METHODS["lora"], tmp_path / "trained", **HERE)


def test_a_quantized_checkpoint_has_no_plain_weights(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_model("llama"), tmp_path / "base"))
    config, _ = train(base, METHODS["qlora"], tmp_path / "trained")
    packed = quantized_config(read_config(config), torch.float32, [])
    packed.save_pretrained(base)
    with pytest.raises(ConfigError, match="no plain weights: its checkpoint is quantized in nf4"):
        load_to_merge(config, METHODS["qlora"], tmp_path / "trained", **HERE, plain_base=True)


def test_an_adapter_may_not_link_to_outside_files(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    config, _ = train(tiny_model("llama"), METHODS["lora"], tmp_path / "trained")
    file = tmp_path / "trained" / "adapter_model.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="points outside it"):
        load_finetuned_model(config, METHODS["lora"], tmp_path / "trained", **HERE)


def test_nf4_precision_needs_an_nf4_base_like_qlora() -> None:
    nf4, plain = ModelConfig(path="m", precision="nf4"), ModelConfig(path="m")
    assert base_quantization(nf4, MethodConfig()) == base_quantization(plain, MethodConfig(kind="qlora")) == "nf4"
    assert base_quantization(plain, MethodConfig()) is None
    assert base_quantization(ModelConfig(path="m", precision="int8"), MethodConfig()) is None


def test_regular_expressions_of_unsloth_are_matched(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Its vision models name their targets by one."""
    config, expected = train(tiny_model("llama"), METHODS["lora"], tmp_path / "trained")
    path = tmp_path / "trained" / "adapter_config.json"
    layers = "(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    pattern = rf"(?:.*?(?:self_attn|mlp).*?{layers}.*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:self_attn|mlp)\.{layers})"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": pattern}))
    model = load_finetuned_model(config, METHODS["lora"], tmp_path / "trained", **HERE)
    assert torch.equal(logits(model), expected)
