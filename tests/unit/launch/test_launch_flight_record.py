"""Flight recorder: the collective each rank is in, and which ranks wait for which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.launch.flight_record import (
    Collective,
    RankRecord,
    describe_records,
    read_records,
    remove_record,
    waits_for,
    write_record,
)
from pantheraml.launch.stacks import explain_hang

READS = '  File "/x/pantheraml/data/dataset.py", line 40 in sequence\n'
BACKWARD = '  File "/x/torch/autograd/graph.py", line 9 in backward\n'
TRAINS = 'Thread 0x7f02 (most recent call first):\n{}  File "/x/pantheraml/engine/loop.py", line 170 in _step\n'


def entry(group: str, number: int, *, at: int, done: bool = True, **other: Any) -> dict[str, Any]:
    """An entry of the recorder, as gloo writes it."""
    return {
        "process_group": (group, "undefined"),
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "state": "scheduled",
        "retired": done,
        "time_created_ns": at,
        **other,
    }


def record(*entries: dict[str, Any]) -> RankRecord:
    return RankRecord.of(map(Collective.from_entry, entries))


AHEAD = record(entry("0", 1, at=1), entry("0", 2, at=2), entry("0", 3, at=3, done=False))
BEHIND = record(entry("0", 1, at=1), entry("0", 2, at=2))


def test_ranks_wait_for_a_peer_that_has_not_started_the_collective() -> None:
    assert waits_for({0: AHEAD, 1: BEHIND, 2: AHEAD}) == {0: [1], 2: [1]}
    expected = "ranks 0 and 2 are in all_reduce 3 of group 0; rank 1 is past all_reduce 2 of group 0"
    assert describe_records({0: AHEAD, 1: BEHIND, 2: AHEAD}) == expected


def test_ranks_in_the_same_collective_do_not_wait_for_one_of_them() -> None:
    assert waits_for({0: AHEAD, 1: AHEAD}) == {}
    assert describe_records({0: AHEAD, 1: AHEAD}) == "ranks 0 and 1 are in all_reduce 3 of group 0"
    assert describe_records({}) is None


def test_groups_have_separate_sequence_numbers() -> None:
    """Tensor groups {0, 1} and {2, 3} and data groups {0, 2} and {1, 3}, named a to d; rank 3 is missing."""
    ranks = {
        0: record(entry("a", 5, at=1), entry("c", 2, at=2, done=False)),
        1: record(entry("a", 5, at=1), entry("d", 2, at=2, done=False)),
        2: record(entry("c", 1, at=1), entry("b", 5, at=2, done=False)),
        3: record(entry("b", 4, at=1), entry("d", 1, at=2)),
    }
    assert waits_for(ranks) == {0: [2], 1: [3], 2: [3]}


def test_the_current_collective_is_the_first_unfinished_one() -> None:
    """Later ones were started too, but cannot run."""
    several = record(entry("0", 4, at=9, done=False), entry("0", 3, at=8, done=False), entry("0", 2, at=7))
    assert several.current == Collective.from_entry(entry("0", 3, at=8, done=False))
    assert several.begun("0") == 4
    assert several.begun("1") is None


def test_done_is_read_from_both_backends() -> None:
    assert Collective.from_entry(entry("0", 1, at=1, done=False, state="completed")).done
    assert Collective.from_entry(entry("0", 1, at=1, done=True)).done
    assert not Collective.from_entry(entry("0", 1, at=1, done=False, state="started")).done


def test_point_to_point_is_described_but_not_counted() -> None:
    sends = entry("0", 3, at=4, done=False, is_p2p=True, p2p_seq_id=7, profiling_name="nccl:send 0->1")
    pipeline = {0: record(entry("0", 3, at=1), sends), 1: BEHIND}
    assert waits_for(pipeline) == {}
    assert (describe_records(pipeline) or "").startswith("rank 0 is in send 0->1 7 of group 0")


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    described = record(entry("3", 3, at=3, process_group=("3", "mesh_tensor")))
    for rank, one in {0: AHEAD, 1: described, 2: record()}.items():
        write_record(tmp_path, rank, one)
    assert read_records(tmp_path) == {0: AHEAD, 1: described}
    assert str(described) == "past all_reduce 3 of group 3 (mesh_tensor)"
    remove_record(tmp_path, 0)
    remove_record(tmp_path, 2)
    assert list(read_records(tmp_path)) == [1]


@pytest.mark.parametrize(
    ("frames", "records", "stuck"),
    [
        # neither stack is waiting, but one rank is in a collective that the other has not started
        ((READS, READS), (AHEAD, BEHIND), "rank 1 is stuck in sequence (dataset.py, line 40), and rank 0 waits for it"),
        # both stacks are waiting, but one rank is in no collective
        ((BACKWARD, BACKWARD), (AHEAD, BEHIND), "rank 1 is stuck in backward (graph.py, line 9), called by _step"),
        ((BACKWARD, BACKWARD), (AHEAD, AHEAD), "ranks 0 and 1 wait for each other"),
        ((BACKWARD, READS), (AHEAD,), "rank 1 is stuck in sequence"),
    ],
)
def test_the_recorder_takes_precedence_over_stacks(
    tmp_path: Path, frames: tuple[str, ...], records: tuple[RankRecord, ...], stuck: str
) -> None:
    for rank, frame in enumerate(frames):
        (tmp_path / f"rank-{rank}.txt").write_text(TRAINS.format(frame))
    for rank, one in enumerate(records):
        write_record(tmp_path, rank, one)
    message = explain_hang(tmp_path) or ""
    assert stuck in message
    assert message.endswith(f" According to torch's flight recorder, {describe_records(dict(enumerate(records)))}.")
