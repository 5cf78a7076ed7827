"""Flight records of waiting ranks, with collectives of several groups."""

from __future__ import annotations

import json
from pathlib import Path

from pantheraml.launch.flight_record import describe_records, read_records, waits_for
from pantheraml.launch.stacks import COLLECTIVE_SHARE
from tests.distributed.launching import run_ranks
from tests.distributed.stuck_ranks import TIMEOUT


def test_stuck_rank_is_identified_across_groups(tmp_path: Path) -> None:
    run_ranks("stuck_ranks", 4, tmp_path)
    records = read_records(tmp_path / "kept")
    assert waits_for(records) == {0: [2], 1: [3], 2: [3]}
    diagnosis = describe_records(records)
    assert diagnosis is not None
    assert "rank 2 is in all_reduce 2 of group" in diagnosis
    assert "rank 3 is past" in diagnosis

    # no group times out before the launcher does
    allowed = json.loads((tmp_path / "timeouts.json").read_text())
    assert len(allowed) == 4
    assert set(allowed.values()) == {COLLECTIVE_SHARE * TIMEOUT}, allowed
