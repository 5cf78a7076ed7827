"""Fused trainable decoder layers on a GPU: gradients close to bf16, captured or not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import enable_layer_graphs, fuse
from pantheraml.models.fast.layer_cuda_graphs import WARMUP_PASSES
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.specs.train import Checkpointing, TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, merged, train_here, values

GPU = torch.device("cuda")
LAYERS, ROWS, LENGTH, VOCABULARY = 2, 2, 500, 1024


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")


def model_in_bf16() -> Any:
    """The shape of Llama-3.2-1B, except for depth and vocabulary."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    with torch.device(GPU):
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa")).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    assert use_document_attention(model) is None
    return model.train()


def in_fp8(model: Any, *, fused: bool) -> Any:
    """Return a copy with fp8 matmuls."""
    twin = copy.deepcopy(model)
    assert use_fp8_matmuls(twin) == 7 * LAYERS
    if fused:
        assert fuse(twin).fused == LAYERS
    return twin


def batches(count: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator).to(GPU) for _ in range(count)]


def add_gradients(model: Any, ids: Tensor) -> float:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return float(loss.detach())


def gradients(model: Any, ids: list[Tensor], *, set_to_none: bool = True) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=set_to_none)
    for batch in ids:
        add_gradients(model, batch)
    return {name: parameter.grad.float() for name, parameter in model.named_parameters()}


def cosine(left: Tensor, right: Tensor) -> float:
    return float(torch.cosine_similarity(left.flatten(), right.flatten(), dim=0))


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], distance: float) -> None:
    errors = {name: float((ours[name] - expected).norm() / expected.norm()) for name, expected in theirs.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= distance, f"{worst}: {errors[worst]}"


def test_gradients_are_as_close_to_bf16_as_unfused() -> None:
    """Those of queries and keys differ most, with both: a cosine of 0.98 at half this width, on a CPU."""
    plain = model_in_bf16()
    exact = gradients(plain, batches())
    single = gradients(in_fp8(plain, fused=False), batches())
    ours = gradients(in_fp8(plain, fused=True), batches())
    for name, expected in exact.items():
        assert cosine(ours[name], expected) > min(0.99, cosine(single[name], expected) - 0.003), name
        assert 0.97 < ours[name].norm() / expected.norm() < 1.03, name


def test_bf16_matmuls() -> None:
    plain = model_in_bf16()
    ours = copy.deepcopy(plain)
    assert fuse(ours).fused == LAYERS
    assert_near(gradients(ours, batches()), gradients(plain, batches()), 0.04)


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_checkpointing(mode: Checkpointing, fp8: bool) -> None:
    ours = model_in_bf16()
    if fp8:
        ours = in_fp8(ours, fused=True)
    else:
        assert fuse(ours).fused == LAYERS
    expected = gradients(ours, batches())
    apply_checkpointing(ours, mode)
    assert_near(gradients(ours, batches()), expected, 0.02)


def test_checkpointed_layer_peak_memory() -> None:
    """Gate, up and one gradient, overwritten by the hidden rows; unfused, three more of that width. In total, with the
    saved tensors of attention and the norms, 6.2 and 9.4 times that size were measured.
    """
    tokens = 8192
    ids = torch.randint(0, VOCABULARY, (4, tokens // 4), device=GPU)
    row, peaks = 2 * 8192 * tokens, []
    for ours in (model_in_bf16(), model_in_bf16()):
        if peaks:
            assert fuse(ours).fused == LAYERS
        apply_checkpointing(ours, "offload")
        for _ in range(2):  # the first iteration allocates gradients and warms up
            ours.zero_grad(set_to_none=False)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                states = ours.model(input_ids=ids, use_cache=False).last_hidden_state
            states.float().square().mean().backward()
            del states
        peaks.append((torch.cuda.max_memory_allocated() - before) / row)
        del ours
    plain, fused = peaks
    assert fused < plain - 2.0, peaks
    assert fused < 7.0, peaks


def graph_pair() -> tuple[Any, Any]:
    theirs = in_fp8(model_in_bf16(), fused=True)
    ours = copy.deepcopy(theirs)
    enable_layer_graphs(ours)
    for ids in batches(WARMUP_PASSES + 1):
        gradients(ours, [ids])
    assert len(ours.model.layers[0].fused_parts.graphs._captured) == 1
    return ours, theirs


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_captured_layers_with_gradient_accumulation(set_to_none: bool) -> None:
    ours, theirs = graph_pair()
    for ids in (batches(2), batches(3), batches(1)):
        actual = gradients(ours, ids, set_to_none=set_to_none)
        assert_near(actual, gradients(theirs, ids, set_to_none=set_to_none), 0.01)


def test_captured_layers_keep_gradients_in_graph_memory() -> None:
    ours, _ = graph_pair()
    gradients(ours, batches())
    (captured,) = ours.model.layers[0].fused_parts.graphs._captured.values()
    addresses = {gradient.data_ptr() for gradient in captured.gradients}
    assert {p.grad.data_ptr() for p in ours.model.layers.parameters()} == addresses


def test_captured_layers_train_like_eager() -> None:
    losses = []
    for model in graph_pair():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        collected = []
        for ids in batches(10):
            optimizer.zero_grad()
            collected.append(add_gradients(model, ids))
            optimizer.step()
        losses.append(collected)
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_captured_full_finetuning_matches_unfused(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "model", hidden_size=128, intermediate_size=256)
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(2000))
    base = {
        "model": {"path": str(tmp_path / "model"), "precision": "fp8"},
        "data": {
            "path": str(tmp_path / "data.jsonl"), "seq_len": 128, "packing": True, "cache_dir": str(tmp_path / "cache"),
        },
        "method": {"kind": "full"},
        "train": {"global_batch_size": 8, "max_steps": 30, "learning_rate": 3e-3, "weights": "bf16"},
    }  # fmt: skip
    losses = {}
    for name, switches, micro in (
        ("unfused", {"fused": "off"}, 8),
        ("fused", {"fused": "on"}, 8),
        ("captured", {"fused": "on", "cuda_graph": "on"}, 8),
        ("parts", {"fused": "on", "cuda_graph": "on"}, 2),
    ):
        config = TrainConfig.model_validate(merged(base, {"train": switches}))
        plan = make_plan(config, micro=micro, device="cuda", precision="bf16")
        run = make_run(tmp_path / name, config, plan.model_copy(update={"fp8_matmuls": True}))
        losses[name] = values(train_here(run), "train.step", "loss")
    for name, actual in losses.items():
        assert actual[-1] < 0.8 * actual[0]
        assert actual[-1] == pytest.approx(losses["unfused"][-1], rel=0.03), name
    assert losses["captured"] == pytest.approx(losses["fused"], rel=0.02)
