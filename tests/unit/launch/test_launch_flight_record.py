"""What torch's flight recorder wrote, read without torch. Gloo's records have the form of NCCL's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pantheraml.launch.flight_record import PREFIX, explain_difference, last_collectives
from pantheraml.launch.stacks import explain_hang

WAITS = '  File "/x/torch/distributed/distributed_c10d.py", line 4180 in all_gather\n'
STACK = f'Thread 0x7f02 (most recent call first):\n{WAITS}  File "/x/pantheraml/engine/loop.py", line 170 in _step\n'


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """Of a process that took part in three collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(2))
        found: dict[str, Any] = pickle.loads(_distributed_c10d._dump_fr_trace())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
    return found


def leave(folder: Path, rank: int, record: dict[str, Any]) -> None:
    (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(record, protocol=2))


def test_the_rank_that_is_behind_is_told(tmp_path: Path, record: dict[str, Any]) -> None:
    before = {**record, "entries": sorted(record["entries"], key=lambda one: one["record_id"])[:-1]}
    leave(tmp_path, 0, record)
    leave(tmp_path, 1, before)
    last = last_collectives(tmp_path)
    assert list(last) == [0, 1]
    assert last[0].name == "all_reduce"
    assert last[0].number == last[1].number + 1
    numbers = [one.number for one in last.values()]
    said = explain_difference(last)
    assert said == f"rank 0 has done all_reduce {numbers[0]}; rank 1 has done all_reduce {numbers[1]}"
    for rank in (0, 1):
        (tmp_path / f"rank-{rank}.txt").write_text(STACK)
    assert f"By torch's flight recorder, {said}." in (explain_hang(tmp_path) or "")


def test_ranks_that_are_in_the_same_collective_do_not_differ(tmp_path: Path, record: dict[str, Any]) -> None:
    leave(tmp_path, 0, record)
    leave(tmp_path, 1, record)
    assert explain_difference(last_collectives(tmp_path)) is None
    (tmp_path / "rank-0.txt").write_text(STACK)
    assert "flight recorder" not in (explain_hang(tmp_path) or "")


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps({"entries": []}), pickle.dumps(Path("x"))])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{PREFIX}0").write_bytes(content)
    assert last_collectives(tmp_path) == {}
