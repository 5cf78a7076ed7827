"""Which rank is stuck, from what Python's fault handler wrote."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pantheraml.launch.stacks import COLLECTIVE_SHARE, DUMP_SHARE, PATIENCE_SHARE, HangWatch, explain_hang, place_of

LOOP = '  File "/x/pantheraml/engine/loop.py", line 170 in _take_steps\n'
FEED = 'Timeout (0:00:08)!\nThread 0x7f01 [feed] (most recent call first):\n  File "/x/queue.py", line 9 in get\n\n'
WAITS = '  File "/x/torch/distributed/distributed_c10d.py", line 4180 in all_gather\n'
SYNCS = '  File "/x/pantheraml/engine/step.py", line 102 in backward\n'
READS = '  File "/x/pantheraml/data/dataset.py", line 40 in sequence\n'
SQUARES = '  File "/x/pantheraml/engine/step.py", line 190 in _squares\n'
LOADS = (
    '  File "/x/ssl.py", line 9 in read\n  File "/x/pantheraml/models/loader.py", line 80 in load_model\n'
    '  File "/x/pantheraml/worker/train.py", line 120 in build_model\n'
)
COLLECTS = '  File "/x/threading.py", line 5 in wait\n  File "/x/pantheraml/checkpoint/writer.py", line 60 in collect\n'
WRITER = '  File "/x/pantheraml/checkpoint/writer.py", line 70 in _write\n'
FLUSHES = '  File "/x/pantheraml/base/folders.py", line 88 in sync\n'


def dump(innermost_frame: str, *, writer: str = "") -> str:
    """Of three threads: one that reads ahead, perhaps one that writes a checkpoint, and the one that trains."""
    writes = f"Thread 0x7f03 [checkpoint] (most recent call first):\n{writer}{WRITER}\n" if writer else ""
    return f"{FEED}{writes}Thread 0x7f02 (most recent call first):\n{innermost_frame}{LOOP}"


def leave(folder: Path, *stacks: str) -> Path:
    for rank, text in enumerate(stacks):
        (folder / f"rank-{rank}.txt").write_text(text)
    return folder


STUCK = "rank 1 is stuck in sequence (dataset.py, line 40)"


@pytest.mark.parametrize(
    ("stacks", "told"),
    [
        ([dump(WAITS), dump(READS), dump(WAITS)], f"{STUCK}, and ranks 0 and 2 wait for it."),
        ([dump(WAITS), dump(READS)], f"{STUCK}, and rank 0 waits for it."),
        ([dump(READS), dump(READS), dump(WAITS)], f"{STUCK}, and rank 2 waits for them."),
        ([dump(SYNCS), dump(READS)], f"{STUCK}, and rank 0 waits for it."),
        ([dump(SYNCS), dump(SQUARES)], "rank 1 is stuck in _squares (step.py, line 190), and rank 0 waits for it."),
        ([dump(READS)], "rank 0 is stuck in sequence (dataset.py, line 40)."),
        ([dump(WAITS), dump(WAITS)], "ranks 0 and 1 wait for each other, rank 0 in all_gather (distributed_c10d.py"),
        ([dump(WAITS)], "rank 0 waits in all_gather (distributed_c10d.py, line 4180), called by _take_steps (loop.py"),
        ([dump(WAITS), dump(LOADS)], "rank 1 is stuck in read (ssl.py, line 9), called by load_model (loader.py"),
    ],
)
def test_the_rank_that_does_not_wait_is_named(tmp_path: Path, stacks: list[str], told: str) -> None:
    assert told in (explain_hang(leave(tmp_path, *stacks)) or "")


@pytest.mark.parametrize("left", ["", "Timeout (0:00:08)!\n", FEED])
def test_a_rank_that_leaves_nothing_is_waited_for(tmp_path: Path, left: str) -> None:
    """As one does that is suspended: its file is there since it began, and nothing is in it."""
    said = explain_hang(leave(tmp_path, dump(WAITS), left, dump(SYNCS)))
    gone = "rank 1 has left no stacks (it is suspended, cut off or gone), and ranks 0 and 2 wait for it."
    assert said == f"The run does not get on: {gone}"
    said = explain_hang(leave(tmp_path, left, dump(WAITS), left))
    gone = "ranks 0 and 2 have left no stacks (they are suspended, cut off or gone), and rank 1 waits for them."
    assert said == f"The run does not get on: {gone}"


def test_one_that_is_stuck_counts_for_more_than_one_that_leaves_nothing(tmp_path: Path) -> None:
    said = explain_hang(leave(tmp_path, dump(WAITS), dump(READS), ""))
    assert said == f"The run does not get on: {STUCK}, and rank 0 waits for it."


def test_the_thread_that_writes_is_what_training_waits_for(tmp_path: Path) -> None:
    stacks = [dump(COLLECTS, writer=WAITS), dump(COLLECTS, writer=FLUSHES), dump(WAITS)]
    said = explain_hang(leave(tmp_path, *stacks))
    assert said is not None
    assert "rank 1 is stuck in sync (folders.py, line 88), and ranks 0 and 2 wait for it." in said


def test_a_thread_that_writes_does_not_speak_for_one_that_trains() -> None:
    place = place_of(dump(READS, writer=WAITS))
    assert place is not None
    assert place.frame.function == "sequence"


@pytest.mark.parametrize("text", ["", "Timeout (0:00:08)!\n", FEED])
def test_nothing_is_made_up(tmp_path: Path, text: str) -> None:
    assert explain_hang(leave(tmp_path, text)) is None
    assert explain_hang(tmp_path / "nowhere") is None


def test_the_parent_speaks_before_a_collective_gives_up() -> None:
    """NCCL would end the rank that waits, which has done nothing wrong, and look as if that had crashed."""
    assert COLLECTIVE_SHARE >= 1.5 * (DUMP_SHARE + PATIENCE_SHARE)


def test_a_rank_that_nobody_waits_for_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatch, "LOOK_SECONDS", 0.0)
    watch = HangWatch(tmp_path, timeout_seconds=0.5)
    leave(tmp_path, "")
    assert not watch.is_over()
    leave(tmp_path, dump(READS))
    assert not watch.is_over(), "its peers may still be about to leave theirs"
    leave(tmp_path, "")
    assert not watch.is_over()
    time.sleep(0.25)
    leave(tmp_path, dump(READS))
    assert not watch.is_over(), "it got on meanwhile, and is stuck anew"
    time.sleep(0.25)
    assert watch.is_over()
