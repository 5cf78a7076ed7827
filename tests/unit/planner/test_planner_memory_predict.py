"""The peak of a step as the maximum over its instants: what changes it, which way, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pantheraml.kernels.lora_columns import COLUMNS
from pantheraml.planner.memory import predict_memory, why_not_predicted
from pantheraml.planner.memory.blocks import MIB, block_bytes
from pantheraml.planner.model_shapes import ModelShapes, read_shapes, shapes_of_config
from pantheraml.planner.setting import Setting
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.prediction import MemoryPrediction
from pantheraml.specs.train import Checkpointing

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 9}
LORA = Setting(frozen_weights="fp8", fused=True, cuda_graph=True, micro_batch=4)
FULL = Setting(method="full", trained_weights="bf16", micro_batch=4)
GIB = 2**30


@pytest.fixture(scope="module")
def llama() -> ModelShapes:
    return shapes_of_config(LLAMA_8B)


def predicted(shapes: ModelShapes, setting: Setting, **changes: Any) -> MemoryPrediction:
    found = predict_memory(shapes, setting.model_copy(update=changes), capability=(9, 0))
    assert found is not None
    return found


def test_parts_add_up_to_what_is_allocated(llama: ModelShapes) -> None:
    for setting in (LORA, FULL):
        found = predicted(llama, setting)
        assert sum(found.parts.values()) == found.allocated_bytes
        assert all(size >= 0 for size in found.parts.values())


def test_a_recorded_run_is_predicted(llama: ModelShapes) -> None:
    found = predicted(llama, LORA)
    assert found.instant == "loss"
    rows = 32 * 8192 * (4096 + COLUMNS + 4)  # of the output projection, with scales: layers kept them then
    assert found.allocated_bytes == pytest.approx(31.917 * GIB - rows, rel=0.005)


def by_mode(shapes: ModelShapes, setting: Setting) -> dict[Checkpointing, int]:
    modes: tuple[Checkpointing, ...] = ("none", "selective", "full", "offload")
    return {mode: predicted(shapes, setting, activation_checkpointing=mode).allocated_bytes for mode in modes}


def test_leaner_checkpointing_needs_less(llama: ModelShapes) -> None:
    sizes = by_mode(llama, FULL.model_copy(update={"micro_batch": 16}))
    assert sizes["none"] > sizes["selective"] > sizes["full"] >= sizes["offload"]


def test_selective_checkpointing_of_fused_layers_saves_nothing(llama: ModelShapes) -> None:
    """They keep less than the outputs of their matmuls: 9.99 and 10.73 GiB were recorded (8b/4, 2026-11-16)."""
    sizes = by_mode(llama, LORA)
    assert sizes["selective"] > sizes["none"] > sizes["full"] > sizes["offload"]


def test_long_sequences_are_predicted_in_tiles(llama: ModelShapes, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two tiles on, and only in the modes that recompute whole layers."""
    changes: dict[str, Any] = {"activation_checkpointing": "offload", "micro_batch": 1, "frozen_weights": "nf4"}

    def activations(seq_len: int, **others: Any) -> int:
        return predicted(llama, LORA, **{**changes, "seq_len": seq_len, **others}).parts["activations"]

    tiled = [activations(seq_len) for seq_len in (32_767, 32_768, 131_072)]
    saved = activations(131_072, activation_checkpointing="none")
    monkeypatch.setattr("pantheraml.planner.memory.fused_layers.TILE", 1 << 30)
    whole = [activations(seq_len) for seq_len in (32_767, 32_768, 131_072)]
    assert tiled[0] == whole[0]
    assert tiled[1] < whole[1]
    # gate and up with their gradients, in bf16 and e4m3, of all but one tile
    assert whole[2] - tiled[2] > (131_072 - 16_384) * 28_672 * 3
    assert saved == activations(131_072, activation_checkpointing="none")


def test_leaner_weights_and_states_need_less(llama: ModelShapes) -> None:
    bf16, fp8, nf4 = (predicted(llama, LORA, frozen_weights=each).parts["weights"] for each in (None, "fp8", "nf4"))
    assert bf16 > fp8 > nf4
    states = [predicted(llama, FULL, optimizer=each).parts["optimizer"] for each in ("adamw_bf16", "adamw8bit")]
    assert states[0] / states[1] == pytest.approx(2, rel=0.05)


def test_gradients_are_there_during_later_passes_of_a_step(llama: ModelShapes) -> None:
    once, often = predicted(llama, LORA), predicted(llama, LORA, accumulation=4)
    adapters = llama.lora_parameters(16) * 4
    assert often.allocated_bytes - once.allocated_bytes == pytest.approx(adapters, rel=0.01)


@pytest.mark.parametrize("name", ["shard", "tensor", "pipeline", "context"])
def test_more_ranks_need_less_each(llama: ModelShapes, name: str) -> None:
    sizes = [
        predicted(llama, FULL, dims=ParallelDims(**{name: ranks}), accumulation=1).allocated_bytes
        for ranks in (1, 2, 4, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_fsdp_makes_two_layers_and_the_rest_whole(llama: ModelShapes) -> None:
    layer, embeddings = 218_112_000, 2 * 128_256 * 4096 + 4096
    eight = ParallelDims(shard=8)
    lora = predicted(llama, LORA, frozen_weights=None, fused=False, dims=eight)
    adapters = llama.lora_parameters(16) // 32
    reduced = adapters * 4 + adapters * 4 // 8  # float32 gradients of a layer, and this rank's sum
    whole = 2 * (layer * 2 + adapters * 4) + embeddings * 2
    assert lora.parts["communication"] == whole + adapters * 4 + reduced
    full = predicted(llama, FULL, dims=eight, micro_batch=1, seq_len=64, activation_checkpointing="full")
    assert full.instant == "reduction of embedding and head"
    assert full.parts["communication"] == embeddings * (2 + 2 + 4) + embeddings * 4 // 8


def test_fsdp_keeps_whole_gradients_until_the_last_pass(llama: ModelShapes) -> None:
    found = predicted(llama, FULL, dims=ParallelDims(shard=8), accumulation=4, micro_batch=1)
    assert found.parts["gradients"] == llama.parameters * 2


def test_adapters_of_named_layers_are_fewer(llama: ModelShapes) -> None:
    attention = predicted(llama, LORA, lora_targets=("self_attn.q_proj", "v_proj"))
    assert attention.parts["optimizer"] < predicted(llama, LORA).parts["optimizer"] / 4
    assert attention.allocated_bytes < predicted(llama, LORA).allocated_bytes


def test_replicas_keep_their_gradients_in_buckets(llama: ModelShapes) -> None:
    replicas = ParallelDims(replicate=8)
    alone, one_of_eight = predicted(llama, LORA), predicted(llama, LORA, dims=replicas)
    assert one_of_eight.parts["gradients"] == llama.lora_parameters(16) * 4
    assert one_of_eight.allocated_bytes > alone.allocated_bytes
    copied = predicted(llama, LORA, dims=replicas, gradient_as_bucket_view=False)
    assert copied.parts["gradients"] == 2 * one_of_eight.parts["gradients"]


@pytest.mark.parametrize(
    ("model", "setting", "reason"),
    [
        (
            {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 9},
            {},
            "gpt2",
        ),
        ({**LLAMA_8B, "model_type": "gemma2"}, {}, "gemma2"),
        (LLAMA_8B, {"devices_per_process": 2}, "several devices"),
        (LLAMA_8B, {"device": "cpu"}, "GPUs"),
        (LLAMA_8B, {"precision": "fp32"}, "fp32"),
        (LLAMA_8B, {"lora_targets": ("q_proj", "lm_head")}, "names lm_head"),
        (LLAMA_8B, {"lora_targets": ("layers.3.self_attn.q_proj",)}, "by their number"),
        (LLAMA_8B, {"compile": True, "frozen_weights": "nf4"}, "compiled"),
        ({**LLAMA_8B, "model_type": "phi3"}, {"compile": True}, "compiled layers of phi3"),
        (LLAMA_8B, {"method": "dora", "lora_dropout": 0.1}, "DoRA with dropout"),
    ],
)
def test_what_is_not_known_is_not_predicted(model: dict[str, Any], setting: dict[str, Any], reason: str) -> None:
    shapes, wanted = shapes_of_config(model), Setting(**setting)
    assert reason in (why_not_predicted(shapes, wanted) or "")
    assert predict_memory(shapes, wanted) is None


def test_gpus_without_kernels_for_packed_documents_are_not_predicted(llama: ModelShapes) -> None:
    setting = LORA.model_copy(update={"precision": "fp16", "fused": False})
    assert predict_memory(llama, setting, capability=(7, 5)) is None
    assert "before compute capability 8.0" in (why_not_predicted(llama, setting, capability=(7, 5)) or "")
    assert predict_memory(llama, setting, capability=(8, 0)) is not None


def test_loading_is_the_peak_of_a_tiny_step(llama: ModelShapes) -> None:
    found = predicted(llama, LORA, micro_batch=1, seq_len=8, activation_checkpointing="full")
    assert found.instant == "loading"
    assert found.parts["loading"] == 128_256 * 4096 * 2  # the head before it is quantized


@pytest.mark.parametrize("kind", ["qwen3_moe", "gemma3", "mamba"])
def test_experts_vision_parts_and_others_are_known_by_their_files_alone(kind: str, tmp_path: Path) -> None:
    """Of a configuration that lacks sizes, they are known from the headers of the weights, but not what layers keep."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    save_file({"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((8, 4), np.float32)}, tmp_path / "m.safetensors")
    shapes = read_shapes(tmp_path)
    assert shapes.parameters == 32
    assert predict_memory(shapes, LORA) is None
    assert "decoder layers are not known" in (why_not_predicted(shapes, LORA) or "")


def test_models_known_by_their_files_alone_are_not_predicted() -> None:
    assert predict_memory(ModelShapes((), tied=False), Setting()) is None


def test_blocks_are_counted_as_the_allocator_does() -> None:
    assert block_bytes(1) == 512
    assert block_bytes(3 * MIB + 1) == 3 * MIB + 512
    assert block_bytes(33 * MIB) == 34 * MIB  # the rest of 1 MiB is not split off
    assert block_bytes(32 * MIB + 512) == 32 * MIB + 512  # almost 2 MiB are
