"""Code blocks of the product documents that need several ranks; see tests/seed_blocks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launching import run_ranks

RANKS = 4  # as the block says


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("blocks")
    run_ranks("seed_blocks_ranks", RANKS, root)
    return root


@pytest.mark.seed("S4:89", "S4-053", "S4-054", "S4-055")
def test_distributed_trainer(folder: Path) -> None:
    for rank in range(RANKS):
        assert json.loads((folder / f"rank-{rank}.json").read_text())["wrapped"] == "DistributedDataParallel"
    assert (folder / "checkpoint.pt").is_file()


@pytest.mark.seed("S1:129", "S1-002", "S1-044", "S1-063", "S1-123", "S1-124")
def test_distributed_setup(folder: Path) -> None:
    for rank in range(RANKS):
        found = json.loads((folder / f"rank-{rank}.json").read_text())
        assert found["gradient"] == [[1.5] * 4], "the mean over ranks"
        status = found["status"]
        assert (status["current_mode"], status["world_size"], status["rank"]) == ("distributed", RANKS, rank)
        assert found["printed"] == "Distributed training is active\nProcess group exists\n"
