"""DistributedDataParallelTrainer on two ranks: the weights of one process, its checkpoints, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.distributed.gpu_trainers_ranks import ACCUMULATE, BATCH, EPOCHS, RATE
from tests.distributed.launching import run_ranks
from tests.distributed.module_trainer_ranks import Pairs, flat, make_net

RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    root = tmp_path_factory.mktemp("gpu-trainers")
    run_ranks("gpu_trainers_ranks", RANKS, root)
    assert not list(root.glob(".partial-*"))
    return [json.loads(Path(root, f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def train_alone() -> tuple[list[float], list[float]]:
    """torch's own loop, with the global batch and the order of the ranks: weights and losses."""
    model, order, losses = make_net(), torch.Generator(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    loader = DataLoader(Pairs(21), batch_size=BATCH * ACCUMULATE * RANKS, shuffle=True, generator=order)
    for epoch in range(EPOCHS):
        order.manual_seed(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        losses.append(total / 21)
    return flat(model), losses


@pytest.mark.seed("S4-052", "S4-053", "S4-054", "S4-018", "S4-098", "S4-100", "S4-101", "S4-110", "C17")
def test_ranks_match_one_process(ranks: list[dict[str, Any]]) -> None:
    """With 21 samples in steps of 12: the last one has 9, of which one batch is shared."""
    weights, losses = train_alone()
    for found in ranks:
        assert found["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
        assert [stats["loss"] for stats in found["stats"]] == pytest.approx(losses, rel=1e-5)
        for epoch, stats in enumerate(found["stats"]):
            assert (stats["epoch"], stats["steps"], stats["samples"], stats["world_size"]) == (epoch, 2, 21, 2)


@pytest.mark.seed("S4-009", "S4-055", "S4-056")
def test_training_continues_from_a_checkpoint(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["epoch"] == 1
        assert found["continued"] == found["weights"]
    assert ranks[0]["missing"] == "CheckpointError: Another rank cannot read the checkpoint."
    assert ranks[1]["missing"].startswith("CheckpointError: There is no checkpoint ")


@pytest.mark.seed("S4-010", "S4-045", "S4-046")
def test_a_rank_is_detected(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        detected = found["detected"]
        assert detected["distributed_training"]
        assert detected["gpu_ids"] == [], "the rank gives its GPU"
        assert detected["trainer"] == "DistributedDataParallelTrainer"


@pytest.mark.seed("S4-096", "S4-102")
def test_fields_that_concern_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        assert found["disabled"].startswith("ConfigError: use_multi_gpu is False, but there are 2 ranks")
        assert found["batch_norm"] == ["BatchNorm1d", "BatchNorm1d"], "synchronized on GPUs alone"
        assert found["wrong_rank"].startswith(f"LaunchError: rank={1 - rank} is set, but the launcher")
        assert found["dataparallel"].startswith("ConfigError: dataparallel is for one process with several GPUs")
