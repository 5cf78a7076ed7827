"""gpt-oss: mxfp4 experts are dequantized as transformers does, without kernel libraries; adapters train on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, ModelError, UnsupportedModelError
from pantheraml.models.lazy_weights import materialize
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.mxfp4 import dequantize_mxfp4
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.specs.train import ModelConfig
from tests.unit.models.conftest import byte_tokenizer

IDS = torch.arange(3, 23)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "max_position_embeddings": 64, "initializer_range": 0.2, "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pad_token_id": 258, "eos_token_id": 257,
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as published: experts as blocks and scales, everything else in bf16."""
    path = tmp_path_factory.mktemp("gpt_oss")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **SIZES)).to(torch.bfloat16)
        model.save_pretrained(path)
        state = load_file(path / "model.safetensors")
        for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = state.pop(name).shape
            state[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            state[f"{name}_scales"] = torch.randint(118, 127, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save_pretrained(path)
    return path


def by_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=dtype, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # transformers leaves experts in bf16
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return result


def test_values_are_those_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 5, 2), dtype=torch.uint8, generator=generator)
    assert torch.equal(dequantize_mxfp4(blocks, scales, where="x"), convert_moe_packed_tensors(blocks, scales))
    exact = dequantize_mxfp4(blocks, scales, where="x").float()
    assert torch.equal(exact, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))  # bf16 loses nothing
    with pytest.raises(ModelError, match="do not match"):
        dequantize_mxfp4(blocks, scales[:2], where="x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_weights_and_logits_equal_transformers(folder: Path, dtype: torch.dtype) -> None:
    expected = by_transformers(folder, dtype)
    model, _ = FastLanguageModel.from_pretrained(str(folder), dtype=dtype)
    state = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(logits(model), logits(expected), rtol=tolerance, atol=tolerance)
    assert not hasattr(model.config, "quantization_config")


def test_plain_experts_give_the_same(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = FastLanguageModel.from_pretrained(str(folder))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert not [key for key in file.keys() if "blocks" in key]  # noqa: SIM118
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(logits(again), logits(model))


def test_attention_can_be_quantized(folder: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), load_in_4bit=True)
    kinds = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, NF4Linear)}
    assert kinds >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    expected = by_transformers(folder).state_dict()
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(model.state_dict()[name], expected[name])


def test_weights_can_be_read_later(folder: Path) -> None:
    config = ModelConfig(path=str(folder))
    model = load_model(config, dtype=torch.float32, device=torch.device("cpu"), lazy_layers=True)
    assert model.get_parameter("model.layers.1.mlp.experts.down_proj").isnan().all()
    materialize(model)
    torch.testing.assert_close(logits(model), logits(by_transformers(folder)), rtol=1e-5, atol=1e-5)


def test_adapters_on_attention_and_experts(folder: Path, tmp_path: Path) -> None:
    def loss(model: Any) -> torch.Tensor:
        result: torch.Tensor = model.train()(input_ids=IDS, labels=IDS).loss
        return result

    model, _ = FastLanguageModel.from_pretrained(str(folder))
    adapted = FastLanguageModel.get_peft_model(
        model, r=2, target_modules=["q_proj", "o_proj", "gate_proj"], target_parameters=EXPERTS
    )
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert any("experts" in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(4):
        step = loss(adapted)
        losses.append(float(step))
        optimizer.zero_grad()
        step.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in trained)
    adapted.save_pretrained(tmp_path)
    expected = logits(adapted)
    in_peft = PeftModel.from_pretrained(by_transformers(folder), str(tmp_path))
    torch.testing.assert_close(logits(in_peft), expected, rtol=1e-4, atol=1e-4)
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path))
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


def test_bad_names_of_experts(folder: Path, tiny_model: Callable[..., Path]) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder))
    with pytest.raises(ConfigError, match=r"(?s)gate_proj.*mlp\.experts\.down_proj"):
        FastLanguageModel.get_peft_model(model, target_parameters=["mlp.experts.gate_proj"])
    with pytest.raises(ConfigError, match="lora_dropout"):
        FastLanguageModel.get_peft_model(model, target_parameters=EXPERTS, lora_dropout=0.1)
    dense, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")))
    with pytest.raises(ConfigError, match="no stacked experts"):
        FastLanguageModel.get_peft_model(dense, target_parameters=EXPERTS)


@pytest.mark.parametrize("damage", ["no scales", "another shape"])
def test_damaged_checkpoints(folder: Path, tmp_path: Path, damage: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    if damage == "no scales":
        del state[f"{name}_scales"]
    else:
        state[f"{name}_blocks"] = state[f"{name}_blocks"][:, :32].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ModelError, UnsupportedModelError), match="down_proj"):
        FastLanguageModel.from_pretrained(str(tmp_path))
