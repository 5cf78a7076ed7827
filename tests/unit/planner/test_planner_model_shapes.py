"""Shapes, counts and bytes against real models, exactly: built by transformers, adapted by PEFT, quantized by us."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.models.adapters import target_layers
from pantheraml.models.quantize.quantized_linear import QuantizedLinear, quantize_linears
from pantheraml.planner.model_shapes import FAMILIES, PARTS, ModelShapes, linear_bytes, read_shapes, shapes_of_config

COMMON: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 80,  # nf4 blocks that are not full
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MOE = {**COMMON, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
GEMMA_TEXT = {**COMMON, "head_dim": 8}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
GPT2 = {"vocab_size": 260, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
CASES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "llama, biases, tied": {**COMMON, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama, wide heads, no groups": {**COMMON, "head_dim": 24, "num_key_value_heads": 4},
    "mistral": COMMON,
    "qwen2": COMMON,
    "qwen3": {**COMMON, "attention_bias": True},
    "gemma": COMMON,
    "gemma, not tied": {**COMMON, "tie_word_embeddings": False},
    "gemma2": COMMON,
    "gemma3_text": COMMON,
    "phi3": COMMON,
    "granite": COMMON,
    "smollm3": COMMON,
    "qwen3_moe": MOE,
    "mixtral": {**COMMON, "num_local_experts": 4},
    "gpt_oss": {**COMMON, "num_local_experts": 4},
    "gemma3": {"text_config": GEMMA_TEXT, "vision_config": VISION},
    "gpt2": GPT2,
    "gpt2, wide": {**GPT2, "n_inner": 48},
}


def build(case: str) -> PreTrainedModel:
    config = AutoConfig.for_model(case.partition(",")[0], **CASES[case])
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


def shapes(model: PreTrainedModel, folder: Path) -> ModelShapes:
    """By the configuration as it is saved, which leaves out defaults."""
    model.config.save_pretrained(folder)
    return read_shapes(folder)


def test_every_weight(model: PreTrainedModel, tmp_path: Path) -> None:
    found = shapes(model, tmp_path)
    real = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert {weight.name: weight.shape for weight in found.weights} == real
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    assert sum(found.by_part().values()) == found.parameters
    assert (found.by_part()["other"] > 0) == (model.config.model_type == "gemma3")
    assert found.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


@pytest.mark.parametrize("targets", ["all-linear", ["0.mlp.down_proj"], ["q_proj", "o_proj"], ["c_attn"], "o_proj"])
def test_lora_parameters(model: PreTrainedModel, tmp_path: Path, targets: Any) -> None:
    found = shapes(model, tmp_path)
    try:
        layers = target_layers(model, targets)
    except ModelError:
        with pytest.raises(ModelError, match="does not have"):
            found.lora_parameters(8, targets)
        return
    adapted = peft.get_peft_model(
        build_like(model), peft.LoraConfig(r=8, target_modules=layers, fan_in_fan_out=model.config.model_type == "gpt2")
    )
    assert found.lora_parameters(8, targets) == adapted.get_nb_trainable_parameters()[0]


def build_like(model: PreTrainedModel) -> Any:
    return AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)


@pytest.mark.parametrize("quantized", ["bf16", "fp8", "int8", "nf4"])
def test_frozen_bytes(model: PreTrainedModel, tmp_path: Path, quantized: Any) -> None:
    found = shapes(model, tmp_path)
    copy = build_like(model)
    if quantized != "bf16":
        count = quantize_linears(copy, quantized, dtype=torch.bfloat16, device=torch.device("cpu"))
        assert count or model.config.model_type == "gpt2"
    real = sum(weight.nbytes for weight in copy.parameters())
    real += sum(
        buffer.nbytes for layer in copy.modules() if isinstance(layer, QuantizedLinear) for buffer in layer.buffers()
    )
    assert sum(found.frozen_bytes(quantized).values()) == real


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_between_others(dense: dict[str, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MOE, **dense))
    real = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert {weight.name: weight.shape for weight in shapes(model, tmp_path).weights} == real


def test_parts() -> None:
    found = shapes_of_config({"model_type": "llama", **COMMON})
    attention, mlp = 2 * 32 * 32 + 2 * 16 * 32, 3 * 80 * 32
    assert found.by_part() == {
        "embedding": 260 * 32, "attention": 3 * attention, "mlp": 3 * mlp, "norms": 7 * 32, "head": 260 * 32,
        "other": 0,
    }  # fmt: skip
    assert found.frozen_bytes("fp8")["mlp"] == 3 * (mlp + 4 * (80 + 80 + 32))
    assert found.frozen_bytes("fp8")["head"] == 2 * 260 * 32


def test_nf4_blocks() -> None:
    assert linear_bytes((1, 1), "nf4") == 32 + 1 + 8
    assert linear_bytes((64, 256), "nf4") == 64 * 256 // 2 + 256 + 8
    assert linear_bytes((64, 257), "nf4") == 257 * 32 + 257 + 16


def test_published_sizes() -> None:
    """Llama 3.1 8B and Qwen3 8B, as their configurations on the hub have them."""
    llama = shapes_of_config(
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    )  # fmt: skip
    assert llama.parameters == 8_030_261_248
    assert llama.lora_parameters(16) == 41_943_040
    qwen = shapes_of_config(
        {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    )  # fmt: skip
    assert qwen.parameters == 8_190_735_360


def test_a_known_family_needs_all_sizes() -> None:
    with pytest.raises(ModelError, match="hidden_size"):
        shapes_of_config({"model_type": "llama", "vocab_size": 3})
    with pytest.raises(UnsupportedModelError, match="'mamba'"):
        shapes_of_config({"model_type": "mamba"})


OTHERS = {
    "olmoe": {**COMMON, "num_experts": 4, "num_experts_per_tok": 2},
    "olmo2": COMMON,
    "gpt_neox": {**COMMON, "rotary_pct": 0.5},
    "starcoder2": {**COMMON, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_by_their_files(family: str, tmp_path: Path) -> None:
    assert family not in FAMILIES
    config = AutoConfig.for_model(family, **OTHERS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    found = read_shapes(tmp_path)
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    parts = found.by_part()
    assert parts["other"] == 0
    assert all(parts[part] for part in PARTS if part != "other")
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    assert parts["embedding"] == parts["head"] == embedding.weight.numel()
    if family != "olmoe":  # whose router and stacked experts are no linear layers
        assert found.lora_parameters(4) == sum(
            4 * sum(layer.weight.shape) for name, layer in model.named_modules()
            if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings()
        )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gemma2", "gemma3_text"])
def test_defaults_of_a_family(family: str) -> None:
    """What a configuration leaves out has the family's default, the head's size among them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **COMMON), dtype=torch.bfloat16)
    found = shapes_of_config({"model_type": family, **COMMON})
    assert found.parameters == sum(weight.numel() for weight in model.parameters())


def test_a_tied_head_that_was_stored_counts_once(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(16, 8), "lm_head.weight": torch.ones(16, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    for tied, parameters in ((True, 128), (False, 256)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2", "tie_word_embeddings": tied}))
        found = read_shapes(tmp_path)
        assert (found.tied, found.parameters) == (tied, parameters)


def test_buffers_of_old_checkpoints_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "tie_word_embeddings": False}))
    tensors = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(0.0),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4),
        "gpt_neox.layers.0.attention.dense.bias": torch.ones(8),
        "embed_out.weight": torch.ones(16, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_shapes(tmp_path)
    assert {weight.name for weight in found.weights} == {"gpt_neox.layers.0.attention.dense.bias", "embed_out.weight"}
    assert not found.tied


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2"}))
    with pytest.raises(ModelError, match="no safetensors files"):
        read_shapes(tmp_path)
    for content in (
        b"",
        b"123",
        struct.pack("<Q", 1 << 40),
        struct.pack("<Q", 4) + b"[1]]",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ModelError, match="corrupted"):
            read_shapes(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2", "quantization_config": {}}))
    with pytest.raises(UnsupportedModelError, match="quantized olmo2"):
        read_shapes(tmp_path)
