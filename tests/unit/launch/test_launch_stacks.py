"""Name the stuck rank from stack dumps of Python's fault handler."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pantheraml.launch import stacks
from pantheraml.launch.stacks import (
    COLLECTIVE_SHARE,
    DUMP_SHARE,
    PATIENCE_SHARE,
    HangWatch,
    explain_hang,
    stack_position,
)

LOOP = '  File "/x/pantheraml/engine/loop.py", line 170 in _take_steps\n'
FEED = 'Timeout (0:00:08)!\nThread 0x7f01 [feed] (most recent call first):\n  File "/x/queue.py", line 9 in get\n\n'
WAITS = '  File "/x/torch/distributed/distributed_c10d.py", line 4180 in all_gather\n'
SYNCS = '  File "/x/pantheraml/engine/step/step.py", line 102 in finish\n'
READS = '  File "/x/pantheraml/data/dataset.py", line 40 in sequence\n'
SQUARES = '  File "/x/pantheraml/engine/step/step.py", line 190 in _squares\n'
LOADS = (
    '  File "/x/ssl.py", line 9 in read\n  File "/x/pantheraml/models/loader.py", line 80 in load_model\n'
    '  File "/x/pantheraml/worker/train.py", line 120 in build_model\n'
)
COLLECTS = '  File "/x/threading.py", line 5 in wait\n  File "/x/pantheraml/checkpoint/writer.py", line 60 in collect\n'
WRITER = '  File "/x/pantheraml/checkpoint/writer.py", line 70 in _write\n'
FLUSHES = '  File "/x/pantheraml/base/folders.py", line 88 in sync\n'


def dump(innermost_frame: str, *, writer: str = "") -> str:
    """Dump of up to three threads: prefetch, checkpoint writer (optional) and training."""
    writes = f"Thread 0x7f03 [checkpoint] (most recent call first):\n{writer}{WRITER}\n" if writer else ""
    return f"{FEED}{writes}Thread 0x7f02 (most recent call first):\n{innermost_frame}{LOOP}"


def leave(folder: Path, *stacks: str) -> Path:
    for rank, text in enumerate(stacks):
        (folder / f"rank-{rank}.txt").write_text(text)
    return folder


STUCK = "rank 1 is stuck in sequence (dataset.py, line 40)"


@pytest.mark.parametrize(
    ("stacks", "expected"),
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
def test_the_rank_that_does_not_wait_is_named(tmp_path: Path, stacks: list[str], expected: str) -> None:
    assert expected in (explain_hang(leave(tmp_path, *stacks)) or "")


@pytest.mark.parametrize("left", ["", "Timeout (0:00:08)!\n", FEED])
def test_a_rank_without_a_dump_is_named(tmp_path: Path, left: str) -> None:
    """Such as a suspended one: its file was created at the start and is empty."""
    message = explain_hang(leave(tmp_path, dump(WAITS), left, dump(SYNCS)))
    reason = "rank 1 has written no stack dump (it is suspended, unreachable or dead), and ranks 0 and 2 wait for it."
    assert message == f"No rank is making progress: {reason}"
    message = explain_hang(leave(tmp_path, left, dump(WAITS), left))
    reason = (
        "ranks 0 and 2 have written no stack dump (they are suspended, unreachable or dead), and rank 1 waits for them."
    )
    assert message == f"No rank is making progress: {reason}"


def test_a_stuck_rank_takes_precedence_over_a_missing_dump(tmp_path: Path) -> None:
    message = explain_hang(leave(tmp_path, dump(WAITS), dump(READS), ""))
    assert message == f"No rank is making progress: {STUCK}, and rank 0 waits for it."


def test_a_stuck_checkpoint_writer_is_named(tmp_path: Path) -> None:
    stacks = [dump(COLLECTS, writer=WAITS), dump(COLLECTS, writer=FLUSHES), dump(WAITS)]
    message = explain_hang(leave(tmp_path, *stacks))
    assert message is not None
    assert "rank 1 is stuck in sync (folders.py, line 88), and ranks 0 and 2 wait for it." in message


def test_the_writer_thread_is_ignored_unless_training_waits_for_it() -> None:
    position = stack_position(dump(READS, writer=WAITS))
    assert position is not None
    assert position.frame.function == "sequence"


@pytest.mark.parametrize("text", ["", "Timeout (0:00:08)!\n", FEED])
def test_no_hang_without_a_training_stack(tmp_path: Path, text: str) -> None:
    assert explain_hang(leave(tmp_path, text)) is None
    assert explain_hang(tmp_path / "nowhere") is None


def test_the_parent_ends_a_hang_before_the_collective_timeout() -> None:
    """NCCL would end the waiting rank, as if that had crashed."""
    assert COLLECTIVE_SHARE >= 1.5 * (DUMP_SHARE + PATIENCE_SHARE)


def test_hang_watch_expires_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangWatch, "CHECK_SECONDS", 0.0)
    watch = HangWatch(tmp_path, timeout_seconds=0.5)
    leave(tmp_path, "")
    assert not watch.is_hung()
    leave(tmp_path, dump(READS))
    assert not watch.is_hung(), "its peers may still write their dumps"
    leave(tmp_path, "")
    assert not watch.is_hung()
    time.sleep(0.25)
    leave(tmp_path, dump(READS))
    assert not watch.is_hung(), "it made progress in between, and is stuck again"
    time.sleep(0.25)
    assert watch.is_hung()


def test_the_files_and_functions_that_stacks_are_matched_by_exist() -> None:
    root = Path(stacks.__file__).parents[2]
    for file, function in stacks._WAITING_FOR_DEVICE:
        assert f"def {function}(" in (root / file.removeprefix("/")).read_text(), (file, function)
    for file in (*stacks._TRAINING_FILES, stacks._WRITER_FILE):
        assert (root / file.removeprefix("/")).is_file(), file
