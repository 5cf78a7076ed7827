"""Small models set up as the engine sets them up for a setting of the planner."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.adapters import apply_method
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import enable_layer_chain, fuse
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.planner.setting import Setting
from pantheraml.specs.train import MethodConfig

# As many key heads as query heads: with fewer, torch's attention on a CPU keeps repeated copies, which GPUs do not.
CONFIG: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build(family: str, layers: int, setting: Setting, **sizes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**CONFIG, **sizes, "num_hidden_layers": layers}), attn_implementation="sdpa"
    )
    model.config.use_cache = False
    dtype = DTYPES[setting.trained_weights if setting.method == "full" else setting.precision]
    model = model.to(dtype)
    if setting.frozen_weights is not None:
        quantize_linears(model, setting.frozen_weights, dtype=dtype, device=torch.device("cpu"))
    assert use_document_attention(model) is None
    targets = setting.lora_targets if isinstance(setting.lora_targets, str) else list(setting.lora_targets)
    method = MethodConfig(
        kind=setting.method, rank=setting.lora_rank, dropout=setting.lora_dropout, target_modules=targets
    )
    model = apply_method(model, method, seed=0)
    if setting.fp8_matmuls:
        use_fp8_matmuls(model)
    if setting.fused:
        assert fuse(model, compare=False).fused == layers
    apply_checkpointing(model, setting.activation_checkpointing)
    if setting.fused:
        enable_layer_chain(model)
    if setting.compile:
        torch.compiler.reset()
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.compile(dynamic=False, backend="aot_eager_decomp_partition")
    return model.train()
