"""What layers keep for the backward, predicted to the byte: counted by autograd's own hooks on models on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.engine.step.loss import LossModel
from pantheraml.kernels.linear_cross_entropy import head as engine_head
from pantheraml.kernels.lora_columns import COLUMNS
from pantheraml.models.adapters import apply_method
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import enable_layer_chain, fuse
from pantheraml.models.fast.linear_groups import _PLAIN_COLUMNS
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.planner.memory import fused_layers, plain_layers
from pantheraml.planner.memory import head as predicted_head
from pantheraml.planner.memory.step_sizes import FP8_COLUMNS, PLAIN_COLUMNS, step_sizes
from pantheraml.planner.model_shapes import shapes_of_config
from pantheraml.planner.setting import Setting
from pantheraml.specs.train import MethodConfig

ROWS, LENGTH = 2, 64
# As many key heads as query heads: with fewer, torch's attention on a CPU keeps repeated copies, which GPUs do not.
CONFIG: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 16, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextlib.contextmanager
def kept_storages(model: torch.nn.Module) -> Iterator[dict[int, Tensor]]:
    """Storages that autograd saves inside, besides parameters and buffers, by address."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own and tensor.untyped_storage().nbytes():
            found.setdefault(address, tensor)  # kept alive, or another tensor could get its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def build(family: str, layers: int, setting: Setting) -> torch.nn.Module:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, num_hidden_layers=layers, **CONFIG), attn_implementation="sdpa"
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
    return model.train()


def kept_bytes(family: str, layers: int, setting: Setting) -> int:
    model = build(family, layers, setting)
    loss_model = LossModel(model)
    tokens = torch.randint(0, CONFIG["vocab_size"], (ROWS, LENGTH))
    positions = torch.arange(LENGTH)[None].expand(ROWS, -1)
    narrower = setting.precision != "fp32" and setting.device == "cpu"
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrower):
        for _ in range(2):  # layers are run as a chain from the second pass on
            with kept_storages(model) as found:
                loss = loss_model(tokens, positions, tokens, None, LENGTH, ROWS * LENGTH)
            loss.backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


FULL: dict[str, Any] = {"method": "full", "precision": "fp32"}
BF16: dict[str, Any] = {"precision": "bf16"}
FUSED: dict[str, Any] = {"precision": "fp32", "fused": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "full fp32": ("llama", FULL),
    "full bf16": ("llama", {**FULL, **BF16, "trained_weights": "bf16"}),
    "full fp32 weights, bf16 compute": ("llama", {**FULL, **BF16}),
    "lora fp32": ("llama", {"precision": "fp32"}),
    "lora bf16": ("llama", BF16),
    "lora bf16 of attention": ("llama", {**BF16, "lora_targets": ("q_proj", "v_proj", "o_proj")}),
    "lora fp32 of one layer": ("llama", {"precision": "fp32", "lora_targets": ("up_proj",)}),
    "lora nf4": ("llama", {"precision": "fp32", "frozen_weights": "nf4"}),
    "lora fp8 bf16": ("llama", {**BF16, "frozen_weights": "fp8"}),
    "lora int8": ("llama", {"precision": "fp32", "frozen_weights": "int8"}),
    "lora with dropout": ("llama", {**BF16, "lora_dropout": 0.1}),
    "dora bf16": ("llama", {**BF16, "method": "dora"}),
    "qwen2 lora": ("qwen2", BF16),
    "qwen3 lora": ("qwen3", BF16),
    "qwen3 full": ("qwen3", {**FULL, **BF16, "trained_weights": "bf16"}),
    "gemma full": ("gemma", {**FULL, **BF16, "trained_weights": "bf16"}),
    "gemma3 lora": ("gemma3_text", BF16),
    "gemma3 full": ("gemma3_text", {**FULL, **BF16, "trained_weights": "bf16"}),
    "phi3 lora": ("phi3", BF16),
    "granite lora": ("granite", BF16),
    "mistral lora": ("mistral", BF16),
    "fused lora": ("llama", FUSED),
    "fused lora of attention": ("llama", {**FUSED, "lora_targets": ("q_proj", "v_proj", "o_proj")}),
    "fused lora fp8": ("llama", {**FUSED, "frozen_weights": "fp8"}),
    "fused lora nf4": ("llama", {**FUSED, "frozen_weights": "nf4"}),
    "fused full": ("llama", {**FUSED, "method": "full", **BF16, "trained_weights": "bf16"}),
    "fused full fp8": ("llama", {**FUSED, "method": "full", "fp8_matmuls": True}),
    "fused qwen3 fp8": ("qwen3", {**FUSED, "frozen_weights": "fp8"}),
    "fused gemma3 fp8": ("gemma3_text", {**FUSED, "frozen_weights": "fp8"}),
    "fused phi3": ("phi3", FUSED),
    "fused granite": ("granite", FUSED),
}


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_of_a_layer_are_exact(name: str) -> None:
    family, changes = CASES[name]
    setting = Setting(device="cpu", lora_rank=4, micro_batch=ROWS, seq_len=LENGTH, **changes)
    measured = (kept_bytes(family, 4, setting) - kept_bytes(family, 2, setting)) / 2
    decoder = shapes_of_config({"model_type": family, "num_hidden_layers": 2, **CONFIG}).decoder
    assert decoder is not None
    kind = fused_layers if setting.fused else plain_layers
    assert sum(kind.kept_tensors(step_sizes(decoder, setting))) == measured


@pytest.mark.parametrize("mode", ["full", "offload"])
def test_recomputed_layers_keep_their_input_alone(mode: Any) -> None:
    setting = Setting(device="cpu", precision="fp32", micro_batch=ROWS, seq_len=LENGTH, activation_checkpointing=mode)
    each = kept_bytes("llama", 4, setting) - kept_bytes("llama", 2, setting)
    assert each / 2 == (ROWS * LENGTH * 64 * 4 if mode == "full" else 0)


def test_constants_are_those_of_the_kernels() -> None:
    assert (COLUMNS, _PLAIN_COLUMNS) == (FP8_COLUMNS, PLAIN_COLUMNS)
    for name in ("CHUNK_ELEMENTS", "TILES_CHUNK_FACTOR", "TRAINED_CHUNK_FACTOR"):
        assert getattr(engine_head, name) == getattr(predicted_head, name)


@pytest.mark.parametrize("vocabulary", [512, 32_000, 128_256, 262_208])
@pytest.mark.parametrize("width", [None, 1024, 2560, 8192])
@pytest.mark.parametrize("trained", [True, False])
def test_chunks_of_logits_are_those_of_the_loss(vocabulary: int, width: int | None, trained: bool) -> None:
    arguments: dict[str, Any] = {"trained": trained, "fp8_width": width}
    assert predicted_head.chunk_rows(vocabulary, **arguments) == engine_head.chunk_rows(vocabulary, **arguments)
