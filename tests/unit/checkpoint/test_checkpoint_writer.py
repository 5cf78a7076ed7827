"""Writing beside the training: what a thread does, what it fails at, and what a kill in the middle leaves."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pantheraml.base.errors import StorageError
from pantheraml.checkpoint.host_copy import HostCopies
from pantheraml.checkpoint.parts import Groups, whole, write_parts
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.checkpoint.writer import CheckpointWriter


def tensors(value: float, size: int = 4) -> Groups:
    return {"weights": whole({"a": torch.full((size,), value)})}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "run").mkdir()
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def writer(store: CheckpointStore) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(store, keep=2)
    yield made
    made.close()


def test_the_newest_and_the_best_are_kept(store: CheckpointStore, writer: CheckpointWriter) -> None:
    for step in range(1, 6):
        writer.start(step, tensors(step), {}, also_keep={2})
        written = writer.collect(wait=True)
        assert written is not None
        assert written.step == step
        assert written.bytes == store.bytes(step)
        assert written.removed == {3: [1], 5: [3]}.get(step, [])
        assert not written.lost
    assert store.steps() == [2, 4, 5]
    assert writer.collect(wait=True) is None


def test_a_copy_does_not_change_with_its_origin() -> None:
    copies, origin = HostCopies(torch.device("cpu")), torch.arange(4.0)
    copy = copies.take("a", origin)
    copies.wait()
    origin.zero_()
    assert copy.tolist() == [0, 1, 2, 3]
    again = copies.take("a", origin)
    assert again.data_ptr() == copy.data_ptr(), "memory serves again"
    assert copies.take("a", torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_fails_in_the_thread_is_raised_by_who_asks(store: CheckpointStore, writer: CheckpointWriter) -> None:
    writer.start(1, tensors(1.0), {}, also_keep=set())
    assert writer.collect(wait=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        writer.start(2, tensors(2.0, size=100_000), {}, also_keep=set())
        with pytest.raises(StorageError, match="the disk is full"):
            writer.collect(wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.steps() == [1]
    store.load(1)
    writer.start(2, tensors(2.0), {}, also_keep=set())  # the failure is told once; there is room again
    assert writer.collect(wait=True)


def test_removed_checkpoints_are_noticed_and_a_new_one_saved(store: CheckpointStore, writer: CheckpointWriter) -> None:
    writer.start(1, tensors(1.0), {}, also_keep=set())
    assert writer.collect(wait=True)
    shutil.rmtree(store.root)
    writer.start(2, tensors(2.0), {}, also_keep=set())
    written = writer.collect(wait=True)
    assert written is not None
    assert written.lost == [1]
    assert store.steps() == [2]


def test_a_folder_that_is_removed_in_mid_write_is_written_again(
    store: CheckpointStore, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = iter([True, False])

    def write_and_lose(folder: Path, groups: Groups, rank: int | None) -> list[Path]:
        files = write_parts(folder, groups, rank=rank)
        if next(removals):
            shutil.rmtree(store.root)
        return files

    monkeypatch.setattr("pantheraml.checkpoint.store.write_parts", write_and_lose)
    writer.start(1, tensors(1.0), {}, also_keep=set())
    written = writer.collect(wait=True)
    assert written is not None
    assert written.failed_once is not None
    assert written.failed_once.startswith("Saving step-00000001 failed: [Errno 2] No such file")
    assert store.load(1).tensors.read_group("weights")["a"].tolist() == [1.0] * 4


def test_a_run_folder_that_is_gone_is_not_made_again(store: CheckpointStore, writer: CheckpointWriter) -> None:
    shutil.rmtree(store.root.parent)
    writer.start(1, tensors(1.0), {}, also_keep=set())
    with pytest.raises(StorageError, match="the run folder is gone"):
        writer.collect(wait=True)
    assert not store.root.parent.exists()


ENDLESS = """
import os, sys, torch
from pathlib import Path
from pantheraml.checkpoint.parts import whole
from pantheraml.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
for _ in sys.stdin:  # for each line a process that writes until it is killed
    pid = os.fork()
    step = 1
    while pid == 0:
        step += 1
        store.save(step, {"weights": whole({"a": torch.full((2_000_000,), float(step))})}, {"step": step})
        store.prune(keep=2, also=set())
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture
def endless(store: CheckpointStore) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ENDLESS, str(store.root)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_kill_in_mid_write_leaves_whole_checkpoints(store: CheckpointStore, endless: subprocess.Popen[str]) -> None:
    store.save(1, tensors(1.0), {"step": 1})
    assert endless.stdin is not None
    assert endless.stdout is not None
    for _ in range(3):
        store.prune(keep=9, also=set())  # what the last kill left
        print(file=endless.stdin, flush=True)
        writes = int(endless.stdout.readline())
        deadline = time.monotonic() + 60
        while not any(store.root.glob(".partial-*/weights.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(writes, signal.SIGKILL)
        assert endless.stdout.readline().strip() == str(-signal.SIGKILL)
        assert store.steps()
        for step in store.steps():
            loaded = store.load(step)
            assert loaded.state == {"step": step}
            assert loaded.tensors.read_group("weights")["a"].eq(step).all()
