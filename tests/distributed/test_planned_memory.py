"""Bytes of every rank's weights, adapters, gradients and optimizer states are those that the planner predicts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pantheraml.engine.step.step import Stepper
from pantheraml.parallel.layout import make_layout
from pantheraml.parallel.process_group import World
from pantheraml.worker.train import build_model
from tests.distributed.launching import run_ranks
from tests.distributed.memory_cases import CASES, LARGE, counted, predicted, write_inputs
from tests.harness import silent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    write_inputs(folder)
    return folder


def run(root: Path, size: int) -> list[dict[str, Any]]:
    """What each rank of that world size found in every case."""
    run_ranks("memory_ranks", size, root, size)
    return [json.loads((root / f"rank-{size}-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def up_to_two(root: Path) -> dict[int, list[dict[str, Any]]]:
    return {size: run(root, size) for size in (1, 2)}


@pytest.fixture(scope="module")
def four(root: Path) -> list[dict[str, Any]]:
    return run(root, 4)


def check(ranks: list[dict[str, Any]], name: str) -> None:
    assert len(ranks) == CASES[name].ranks
    for rank in ranks:
        assert rank[name]["counted"] == rank[name]["predicted"]
        assert rank[name]["counted"]["gradients"] > 0


@pytest.mark.seed(
    "S1-089",
    "S4-039",
    partly="every rank's bytes are counted; DataParallel's, to compare, need several GPUs",
)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks <= 2])
def test_bytes_of_every_rank_are_exact(up_to_two: dict[int, list[dict[str, Any]]], name: str) -> None:
    check(up_to_two[CASES[name].ranks], name)


@pytest.mark.extended
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks == 4])
def test_bytes_of_each_of_four_ranks_are_exact(four: list[dict[str, Any]], name: str) -> None:
    check(four, name)


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """A process group whose collectives do nothing, for one rank of a large world."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", LARGE)
def test_bytes_are_exact_in_large_worlds(root: Path, name: str) -> None:
    """Weights and adapters as sharded, and so the gradients of their trained parts."""
    case = LARGE[name]
    config = case.config(root)
    plan = case.plan(config)
    for rank in {0, case.ranks // 2 + 1, case.ranks - 1}:
        with as_rank(rank, case.ranks):
            layout = make_layout(plan.dims, "cpu")
            world = World(rank=rank, size=case.ranks, device=torch.device("cpu"), layout=layout)
            stepper = Stepper(build_model(config, plan, world, silent), config, world, plan).setup()
            expected, found = predicted(case, root, layout.coordinates), counted(stepper)
        trained = sum(part.numel() * part.element_size() for _, part in stepper.parts)
        assert {**found, "gradients": trained} == {**expected, "optimizer": 0}
