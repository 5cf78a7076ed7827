"""MultiGPUTrainer and pantheraml.distributed on two ranks: the weights of one process, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.launching import run_ranks
from tests.distributed.module_trainer_ranks import (
    BATCH,
    EPOCHS,
    METHODS,
    RATE,
    Texts,
    flat,
    make_causal,
    make_net,
    pair_loader,
)

Found = list[dict[str, Any]]
RANKS = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    root = tmp_path_factory.mktemp("module-trainer")
    run_ranks("module_trainer_ranks", RANKS, root)
    return [json.loads(Path(root, f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def train_alone(method: str) -> tuple[list[float], list[float]]:
    """One process that computes each rank's gradient and combines them as the method says; weights and epoch losses."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    weights = METHODS[method].get("aggregation_weights", [1.0] * RANKS)
    loader, means = pair_loader(BATCH * RANKS), []
    for _ in range(EPOCHS):
        total = 0.0
        for inputs, targets in loader:
            total += nn.functional.mse_loss(model(inputs), targets).item() * len(inputs)
            shares = [BATCH] * RANKS if len(inputs) == BATCH * RANKS else [len(inputs) - len(inputs) // 2] * RANKS
            parts = zip(inputs.split(shares[0]), targets.split(shares[0]), strict=True)
            votes = [(len(x), gradients(model, nn.functional.mse_loss(model(x), y))) for x, y in parts]
            for index, parameter in enumerate(model.parameters()):
                rows = torch.stack([gradient[index] for _, gradient in votes])
                mass = torch.tensor([count * weight for (count, _), weight in zip(votes, weights, strict=True)])
                share = (mass / mass.sum()).view(-1, *[1] * parameter.dim())
                parameter.grad = rows.mean(0) if method == "median" else (rows * share).sum(0)
            optimizer.step()
        means.append(total / len(loader.dataset))  # type: ignore[arg-type]
    return flat(model), means


@pytest.mark.seed(
    *("S3-023", "S3-024", "S3-025", "S3-026", "S3-027", "S3-028", "S3-037", "S3-039", "S3-055", "S3-057", "S3-058"),
    *("S3-059", "S3-060", "C21"),
)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_match_one_process(ranks: Found, method: str) -> None:
    weights, losses = train_alone(method)
    for found in ranks:
        got = found["pairs"][method]
        assert got["weights"] == pytest.approx(weights, rel=1e-5, abs=1e-6)
        assert [stats["loss"] for stats in got["stats"]] == pytest.approx(losses, rel=1e-5)
        for epoch, stats in enumerate(got["stats"], start=1):
            assert (stats["epoch"], stats["samples"], stats["steps"], stats["world_size"]) == (epoch, 21, 4, RANKS)
            assert stats["skipped_steps"] == 0
            assert stats["samples_per_second"] > 0


@pytest.mark.seed("S3-039", "S3-055")
def test_language_models_count_target_tokens(ranks: Found) -> None:
    """Also where one rank's batch has no target at all."""
    model = make_causal()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    losses, targets = 0.0, 0
    for batch in DataLoader(Texts(), batch_size=BATCH * RANKS):
        loss = model(**batch).loss
        count = int((batch["labels"][:, 1:] != -100).sum())
        losses, targets = losses + loss.item() * count, targets + count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for found in ranks:
        assert found["texts"]["weights"] == pytest.approx(flat(model), rel=1e-5, abs=1e-6)
        assert found["texts"]["stats"][0]["loss"] == pytest.approx(losses / targets, rel=1e-5)


@pytest.mark.seed("S3-062", "S3-072")
def test_nan_of_one_rank_stops_all(ranks: Found) -> None:
    for found in ranks:
        assert found["nan"].startswith("Training stopped at step 1")


def test_bad_input_on_ranks(ranks: Found) -> None:
    for found in ranks:
        assert found["more"].startswith("LaunchError: num_gpus=3 is set, but the launcher started 2 process(es)")
        assert found["not_set_up"] == "The trainer is not set up."


@pytest.mark.seed("S0-009", "S0-010", "S0-012", "S0-030", "S0-092", "S3-057")
def test_communication(ranks: Found) -> None:
    for rank, found in enumerate(ranks):
        got = found["communication"]
        assert (got["world"], got["rank"], got["main"]) == (RANKS, rank, rank == 0)
        assert got["sent"] == {"from": 1}
        assert got["reduced"] == {"mean": 1.5, "sum": 3.0, "min": 1.0, "max": 2.0}
        assert got["not_joined"].startswith("ConfigError: barrier was called on one of 2 ranks")
        assert got["no_such_rank"].startswith("ConfigError: src=2 is not a rank of 2")
        assert got["tensor"].startswith("ConfigError: The value of rank 0 cannot be broadcast: Object of type Tensor")
