"""Adapters: which layers are adapted, initial values, and that plain PEFT can load what is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.models.adapters import (
    TrainedWeights,
    apply_method,
    base_quantization,
    parameter_count,
    save_trained,
    target_layers,
    trainable_parameters,
)
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.models.quantize.quantized_linear import dequantize_linears, quantize_linears
from pantheraml.models.tiny_model import tiny_model as small_model
from pantheraml.specs.train import MethodConfig, ModelConfig

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2"]
METHODS = {
    "lora": MethodConfig(kind="lora", rank=3),
    "dora": MethodConfig(kind="dora", rank=3),
    "rslora": MethodConfig(kind="lora", rank=3, rslora=True),
    "qlora": MethodConfig(kind="qlora", rank=3),
}
CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12) * 7


def adapted(folder: Path, method: MethodConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    config = ModelConfig(path=str(folder))
    base = load_model(config, dtype=dtype, device=CPU, quantize=base_quantization(config, method))
    return apply_method(base, method, seed=seed)


def perturb(model: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    for _, parameter in trainable_parameters(model):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def save(model: Any, method: MethodConfig, base: Path, path: Path) -> str:
    config = ModelConfig(path=str(base))
    save_trained(TrainedWeights.of(model), path, method=method, model_config=config, tokenizer=load_tokenizer(config))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_gives_the_same_logits(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, name: str
) -> None:
    base, method = tiny_model(family), METHODS[name]
    model = adapted(base, method)
    untrained = logits(model)
    perturb(model)
    save(model, method, base, tmp_path / "adapter")

    plain = AutoModelForCausalLM.from_pretrained(base)
    if name == "qlora":  # the dequantized base
        quantize_linears(plain, "nf4", dtype=torch.float32, device=CPU)
        dequantize_linears(plain, torch.float32)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-5, rtol=1e-5)
    assert float((logits(model) - untrained).abs().max()) > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", METHODS)
def test_saved_adapter_contains_only_adapter_weights(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, name: str
) -> None:
    base = tiny_model(family)
    save(adapted(base, METHODS[name]), METHODS[name], base, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert weights
    assert all("lora_" in key for key in weights)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert Path(config["base_model_name_or_path"]).is_absolute()
    assert config["target_modules"] == sorted(config["target_modules"])
    assert "all-linear" not in config["target_modules"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "adapter")) == 259


@pytest.mark.parametrize("name", METHODS)
def test_untrained_adapter_changes_nothing(tiny_model: Callable[..., Path], name: str) -> None:
    base, method = tiny_model("qwen2"), METHODS[name]
    config = ModelConfig(path=str(base))
    plain = load_model(config, dtype=torch.float32, device=CPU, quantize=base_quantization(config, method))
    torch.testing.assert_close(logits(adapted(base, method)), logits(plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_over_a_base_that_keeps_its_dtype(
    tiny_model: Callable[..., Path], name: str, dtype: torch.dtype
) -> None:
    model = adapted(tiny_model("qwen2"), METHODS[name], dtype=dtype)
    assert {parameter.dtype for _, parameter in trainable_parameters(model)} == {torch.float32}
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert frozen == {dtype}
    assert logits(model).dtype == dtype


def test_initial_values_depend_only_on_the_seed(tiny_model: Callable[..., Path]) -> None:
    def initial(seed: int, dtype: torch.dtype = torch.float32, targets: Any = "all-linear") -> dict[str, torch.Tensor]:
        method = MethodConfig(rank=3, target_modules=targets)
        model = adapted(tiny_model("llama"), method, seed=seed, dtype=dtype)
        return {name: parameter.detach() for name, parameter in trainable_parameters(model)}

    torch.manual_seed(1)
    first = initial(5)
    state = torch.get_rng_state()
    torch.rand(7)
    again = initial(5, dtype=torch.bfloat16)
    assert all(torch.equal(again[name], first[name]) for name in first)
    few = initial(5, targets=["v_proj"])
    assert all(torch.equal(few[name], first[name]) for name in few)
    other = initial(6)
    assert not any(torch.equal(other[name], first[name]) for name in first if "lora_A" in name)
    torch.set_rng_state(state)
    initial(5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 6.0 / 4), (True, 6.0 / 2)])
def test_settings_reach_the_layers(tiny_model: Callable[..., Path], tmp_path: Path, rslora: bool, scale: float) -> None:
    method = MethodConfig(rank=4, alpha=6.0, rslora=rslora, dropout=0.25, target_modules=["q_proj"])
    model = adapted(tiny_model("llama"), method)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(scale)
    assert layer.lora_A["default"].weight.shape == (4, 32)
    assert layer.lora_dropout["default"].p == 0.25
    save(model, method, tiny_model("llama"), tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["lora_dropout"]) == (4, 6.0, 0.25)
    assert (saved["use_rslora"], saved["use_dora"], saved["target_modules"]) == (rslora, False, ["q_proj"])


def test_dora_magnitude_starts_as_the_weight_norm(tiny_model: Callable[..., Path]) -> None:
    for family, name, dim in (("llama", "model.layers.1.mlp.up_proj", 1), ("gpt2", "transformer.h.1.mlp.c_fc", 0)):
        layer = adapted(tiny_model(family), METHODS["dora"], dtype=torch.bfloat16).get_base_model().get_submodule(name)
        expected = layer.base_layer.weight.float().norm(dim=dim)
        torch.testing.assert_close(layer.lora_magnitude_vector["default"].weight, expected)


def test_layers_get_different_initial_values(tiny_model: Callable[..., Path]) -> None:
    model = adapted(tiny_model("llama"), MethodConfig(rank=3))
    weights = {name: parameter.detach() for name, parameter in trainable_parameters(model)}
    name = "base_model.model.model.layers.{}.self_attn.{}.lora_A.default.weight"
    assert not torch.equal(weights[name.format(0, "q_proj")], weights[name.format(1, "q_proj")])
    assert not torch.equal(weights[name.format(0, "q_proj")], weights[name.format(0, "k_proj")])
    bound = 32**-0.5
    assert 0.8 * bound < float(weights[name.format(0, "q_proj")].abs().max()) <= bound


def test_full_fine_tuning_trains_every_weight(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base, method = tiny_model("gpt2"), MethodConfig(kind="full")
    model = adapted(base, method)
    assert len(trainable_parameters(model)) == len(list(model.parameters()))
    perturb(model)
    save(model, method, base, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logits(loaded), logits(model))
    assert loaded.config.use_cache is True
    assert model.config.use_cache is False


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_selects_all_but_the_head(tiny_model: Callable[..., Path], family: str) -> None:
    model = load_model(ModelConfig(path=str(tiny_model(family))), dtype=torch.float32, device=CPU)
    names = target_layers(model, "all-linear")
    per_layer = {"phi3": 4, "gpt2": 4}.get(family, 7)
    assert len(names) == 2 * per_layer
    assert not any("lm_head" in name for name in names)


def test_target_modules_by_name(tiny_model: Callable[..., Path]) -> None:
    model = load_model(ModelConfig(path=str(tiny_model("llama"))), dtype=torch.float32, device=CPU)
    assert len(target_layers(model, ["q_proj", "v_proj"])) == 4
    assert len(target_layers(model, "q_proj")) == 2
    assert target_layers(model, ["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]
    with pytest.raises(ModelError, match="does not have: wq, oops") as caught:
        target_layers(model, ["q_proj", "wq", "oops"])
    assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in str(caught.value)
    with pytest.raises(ModelError, match="empty"):
        target_layers(model, [])


def test_a_full_name_selects_one_layer(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    method = MethodConfig(rank=2, target_modules=["layers.1.mlp.up_proj"])
    model = adapted(base, method)
    assert len(trainable_parameters(model)) == 2
    perturb(model)
    save(model, method, base, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model))


def test_a_tied_head_is_rejected(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="is tied to the input embedding"):
        adapted(tiny_model("gpt2"), MethodConfig(target_modules=["c_attn", "lm_head"]))


def test_layers_that_peft_cannot_adapt_are_reported() -> None:
    mamba: Any = small_model(AutoConfig.for_model("mamba2"))
    with pytest.raises(UnsupportedModelError, match="'out_proj' is incompatible with Mamba") as caught:
        apply_method(mamba, MethodConfig(), seed=0)
    assert "method.target_modules=in_proj." in str(caught.value)
    apply_method(small_model(AutoConfig.for_model("mamba2")), MethodConfig(target_modules=["in_proj"]), seed=0)


def test_quantized_parameters_are_counted_by_their_dense_size(tiny_model: Callable[..., Path]) -> None:
    for family in ("llama", "gpt2"):
        assert parameter_count(adapted(tiny_model(family), METHODS["qlora"])) == parameter_count(
            adapted(tiny_model(family), METHODS["lora"])
        )
