from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.parallel.data import (
    ComputeTimer,
    decide_static_graph,
    sync_batch_norm,
    uses_reentrant_checkpointing,
    without_sync,
    wrap,
)
from pantheraml.parallel.process_group import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
STATIC_GRAPH_OK = {
    "allowed": True,
    "reentrant_checkpointing": True,
    "unused_parameters": False,
    "accumulates": False,
    "compiled": False,
    "mixture_of_experts": False,
}


def test_gather_in_one_process() -> None:
    rows = ALONE.gather([1.0, 2.0])
    assert rows.tolist() == [[1.0, 2.0]]


def test_one_process_is_not_wrapped_in_ddp() -> None:
    model = nn.Linear(2, 2)
    settings = SimpleNamespace(
        find_unused_parameters=False, gradient_as_bucket_view=True, broadcast_buffers=True, bucket_cap_mb=25
    )
    assert wrap(model, ALONE, settings) is model
    with without_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.seed("S1-092", "S2-069")
def test_static_graph_is_on_for_reentrant_checkpointing() -> None:
    assert decide_static_graph(**STATIC_GRAPH_OK).value


@pytest.mark.seed("C8", "S1-025", "S2-070")
@pytest.mark.parametrize(
    ("against", "reason"),
    [
        ({"allowed": False}, "parallel.static_graph"),
        ({"reentrant_checkpointing": False}, "not needed"),
        ({"unused_parameters": True}, "find_unused_parameters"),
        ({"accumulates": True}, "no_sync"),
        ({"compiled": True}, "compiled"),
        ({"mixture_of_experts": True}, "experts"),
    ],
)
def test_static_graph_is_off_for_a_reason(against: dict[str, bool], reason: str) -> None:
    decision = decide_static_graph(**{**STATIC_GRAPH_OK, **against})
    assert not decision.value
    assert reason in decision.reason


@pytest.fixture(scope="module")
def llama() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=11, num_key_value_heads=1))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [({"use_reentrant": True}, True), ({"use_reentrant": False}, False), ({}, True), (None, False)],
)
def test_reentrant_checkpointing_is_detected(llama: Any, arguments: dict[str, bool] | None, expected: bool) -> None:
    llama.gradient_checkpointing_enable(arguments)
    assert uses_reentrant_checkpointing(llama) is expected
    llama.gradient_checkpointing_disable()
    assert not uses_reentrant_checkpointing(llama)


@pytest.mark.parametrize("mode", ["full", "selective", "offload"])
def test_pantheraml_checkpointing_is_not_reentrant(llama: Any, mode: Any) -> None:
    apply_checkpointing(llama, mode)
    assert not uses_reentrant_checkpointing(llama)
    apply_checkpointing(llama, "none")


def test_reentrant_checkpointing_through_a_custom_function_is_detected(llama: Any) -> None:
    def offloading(function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, **kwargs)

    llama.gradient_checkpointing_enable()
    for layer in llama.model.layers:
        layer._gradient_checkpointing_func = partial(offloading, use_reentrant=True)
    assert uses_reentrant_checkpointing(llama)
    llama.gradient_checkpointing_disable()


def test_sync_batch_norm_is_skipped_without_layers_or_gpu() -> None:
    plain, normed = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for model, device, reason in ((plain, "cuda", "no batch norm"), (normed, "cpu", "on GPUs only")):
        same, decision = sync_batch_norm(model, torch.device(device))
        assert same is model
        assert not decision.value
        assert reason in decision.reason


def test_batch_norm_is_converted_for_gpus() -> None:
    """Converting needs no GPU, only running does."""
    normed = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    converted, decision = sync_batch_norm(normed, torch.device("cuda"))
    assert decision.value
    assert isinstance(converted[1], nn.SyncBatchNorm)


def test_compute_timer_ends_with_the_first_parameters_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    clock = ComputeTimer(list(model.named_parameters()), torch.device("cpu"))
    clock.start()
    time.sleep(0.05)
    model(torch.ones(1, 4)).sum().backward()
    worked = clock.seconds()
    time.sleep(0.01)  # waiting for peers is not counted
    assert clock.seconds() == worked >= 0.05
    clock.start()
    assert clock.seconds() == 0, "nothing was computed since"
    clock.close()
    model(torch.ones(1, 4)).sum().backward()
    assert clock.seconds() == 0


def test_compute_timer_spans_all_micro_batches() -> None:
    model = nn.Linear(4, 4)
    clock = ComputeTimer(list(model.named_parameters()), torch.device("cpu"))
    clock.start()
    for _ in range(3):
        time.sleep(0.02)
        model(torch.ones(1, 4)).sum().backward()
    assert clock.seconds() >= 0.06
    clock.close()
