"""A tensor parallel model matches the unsharded one, and its communication matches theory."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.distributed.launching import run_ranks
from tests.distributed.tensor_ranks import CASES

pytestmark = pytest.mark.extended

RANKS = 4
LAYERS = 2
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Case -> the worst relative differences on any rank, over three steps of two micro-batches."""
    path = tmp_path_factory.mktemp("tensor") / "results.json"
    run_ranks("tensor_ranks", RANKS, path)
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return found


@pytest.mark.seed("S0-109")
@pytest.mark.parametrize("name", CASES)
def test_same_losses_gradients_weights_and_logits(results: dict[str, dict[str, Any]], name: str) -> None:
    for what in ("loss", "gradient", "weights", "logits"):
        assert results[name][what] <= TOLERANCE[CASES[name].dtype], what


@pytest.mark.parametrize("what", ["logits", "gradients"])
def test_sharded_fp8_is_as_accurate_as_unsharded(results: dict[str, dict[str, Any]], what: str) -> None:
    alone, cut = results["fp8"][what]
    assert 1e-3 < alone < 0.2, "fp8 rounds"
    assert cut <= 1.1 * alone


@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_rank_holds_its_share_of_the_weights(results: dict[str, dict[str, Any]], name: str) -> None:
    """Replicated adapters and norms are at most a tenth of these small models."""
    fair = 1 / CASES[name].degree
    assert fair <= results[name]["share"] <= fair + 0.1


def test_tensor_parallel_layer_sends_activations_twice_each_way(results: dict[str, dict[str, Any]]) -> None:
    sent = results["llama full"]["collectives"]
    # two per decoder layer, and the embedding; two numbers per token for the loss
    assert sent["forward"] == {"all_reduce": 2 * LAYERS + 1, "allgather_": 1}
    # two per decoder layer, and the gradient of the last hidden states
    assert sent["backward"] == {"all_reduce": 2 * LAYERS, "allreduce_": 1}
    assert sent["end"] == {}


def test_replicated_parameters_reduce_their_gradients_together(results: dict[str, dict[str, Any]]) -> None:
    sent = results["qwen3 full"]["collectives"]
    assert sent["forward"] == {"all_reduce": 2 * LAYERS + 1, "allgather_": 1}
    assert sent["backward"] == {"all_reduce": 2 * LAYERS, "allreduce_": 1}
    # the gradients of the norms of queries and keys
    assert sent["end"] == {"allreduce_": 1}


def test_adapters_reduce_only_their_replicated_halves(results: dict[str, dict[str, Any]]) -> None:
    sent = results["llama lora"]["collectives"]
    assert sent["forward"] == {"all_reduce": 2 * LAYERS + 1, "allgather_": 1}
    # the first layer's input needs no gradient
    assert sent["backward"] == {"all_reduce": 2 * LAYERS - 1, "allreduce_": 1}
    # all seven adapted linears of both decoder layers at once
    assert sent["end"] == {"allreduce_": 1}
