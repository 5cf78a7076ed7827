"""Code blocks of the product documents that need several ranks; see tests/seed_blocks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launching import run_ranks

RANKS = 4  # as the block says


@pytest.mark.seed("S1:129", "S1-002", "S1-044", "S1-063", "S1-123", "S1-124")
def test_distributed_setup(tmp_path: Path) -> None:
    run_ranks("seed_blocks_ranks", RANKS, tmp_path)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["gradient"] == [[1.5] * 4], "the mean over ranks"
        status = found["status"]
        assert (status["current_mode"], status["world_size"], status["rank"]) == ("distributed", RANKS, rank)
        assert found["printed"] == "Distributed training is active\nProcess group exists\n"
