"""Which rank is stuck, from what Python's fault handler wrote."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pantheraml.launch.stacks import HangWatch, explain_hang, innermost

LOOP = '  File "/x/pantheraml/engine/loop.py", line 170 in _take_steps\n'
FEED = 'Timeout (0:00:08)!\nThread 0x7f01 [feed] (most recent call first):\n  File "/x/queue.py", line 9 in get\n\n'
WAITS = '  File "/x/torch/distributed/distributed_c10d.py", line 4180 in all_gather\n'
READS = '  File "/x/pantheraml/data/dataset.py", line 40 in sequence\n'


def dump(innermost_frame: str) -> str:
    return f"{FEED}Thread 0x7f02 (most recent call first):\n{innermost_frame}{LOOP}"


def leave(folder: Path, *stacks: str) -> Path:
    for rank, text in enumerate(stacks):
        (folder / f"rank-{rank}.txt").write_text(text)
    return folder


def test_the_rank_that_does_not_wait_is_named(tmp_path: Path) -> None:
    said = explain_hang(leave(tmp_path, dump(WAITS), dump(READS), dump(WAITS)))
    assert said is not None
    assert "rank 1 is stuck in sequence (dataset.py, line 40), and rank 0, 2 waits for it" in said


def test_ranks_that_all_wait(tmp_path: Path) -> None:
    said = explain_hang(leave(tmp_path, dump(WAITS), dump(WAITS)))
    assert said is not None
    assert "Ranks 0, 1 wait for each other" in said


@pytest.mark.parametrize("text", ["", "Timeout (0:00:08)!\n", FEED])
def test_nothing_is_made_up(tmp_path: Path, text: str) -> None:
    assert explain_hang(leave(tmp_path, text)) is None
    assert explain_hang(tmp_path / "nowhere") is None


def test_the_thread_that_trains_is_looked_at() -> None:
    frame = innermost(dump(READS))
    assert frame is not None
    assert frame.function == "sequence"


def test_a_rank_that_nobody_waits_for_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatch, "LOOK_SECONDS", 0.0)
    watch = HangWatch(tmp_path, timeout_seconds=0.5)
    leave(tmp_path, "")
    assert not watch.is_over()
    leave(tmp_path, dump(READS))
    assert not watch.is_over(), "its peers may still be waiting for it"
    leave(tmp_path, "")
    assert not watch.is_over()
    time.sleep(0.25)
    leave(tmp_path, dump(READS))
    assert not watch.is_over(), "it got on meanwhile, and is stuck anew"
    time.sleep(0.25)
    assert watch.is_over()
