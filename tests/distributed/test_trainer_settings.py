"""enable_multi_gpu(batch_size_per_gpu=, gradient_aggregation=) with transformers' Trainer on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from tests.distributed.launching import run_ranks
from tests.distributed.module_trainer_ranks import flat, make_causal
from tests.distributed.trainer_settings_ranks import BATCH, CASES, RATE, STEPS, Rows

RANKS = 2


def train_alone(case: dict[str, Any]) -> list[float]:
    """One process that combines the mean token gradients of the ranks' samples as the method says."""
    model, rows, accumulate = make_causal(), Rows(), case.get("accumulate", 1)
    weights = case.get("aggregation_weights", [1.0] * RANKS)
    batches = [list(range(start, start + BATCH)) for start in range(0, BATCH * RANKS * STEPS * accumulate, BATCH)]
    for step in range(STEPS):
        votes = []
        for rank in range(RANKS):
            chosen = [batches[(step * accumulate + micro) * RANKS + rank] for micro in range(accumulate)]
            batch = default_collate([rows[index] for indices in chosen for index in indices])
            targets = int((batch["labels"][:, 1:] != -100).sum())
            votes.append((targets, torch.autograd.grad(model(**batch).loss, list(model.parameters()))))
        mass = torch.tensor([count * weight for (count, _), weight in zip(votes, weights, strict=True)])
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                gradients = torch.stack([gradient[index] for _, gradient in votes])
                share = (mass / mass.sum()).view(-1, *[1] * parameter.dim())
                median = case["gradient_aggregation"] == "median"
                parameter -= RATE * (gradients.mean(0) if median else (gradients * share).sum(0))
    return flat(model)


@pytest.mark.seed("S3-016", "S3-017", "S3-038", "S3-043", "S3-058", "S3-059", "S3-060")
@pytest.mark.parametrize("name", CASES)
def test_trainers_aggregate_as_enabled(name: str, tmp_path: Path) -> None:
    run_ranks("trainer_settings_ranks", RANKS, name, tmp_path)
    found = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)]
    expected = train_alone(CASES[name])
    for got in found:
        assert got["batch"] == BATCH
        assert got["weights"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
