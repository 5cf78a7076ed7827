"""The asynchronous checkpoint writer: results, errors in the thread, and a kill during the write."""

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
from pantheraml.checkpoint.sharded_files import Groups, unsharded, write_shards
from pantheraml.checkpoint.store import CheckpointStore
from pantheraml.checkpoint.writer import CheckpointWriter


def tensors(value: float, size: int = 4) -> Groups:
    return {"weights": unsharded({"a": torch.full((size,), value)})}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "run").mkdir()
    return CheckpointStore(tmp_path / "run" / "checkpoints")


@pytest.fixture
def writer(store: CheckpointStore) -> Iterator[CheckpointWriter]:
    made = CheckpointWriter(store, keep=2)
    yield made
    made.close()


def test_the_newest_and_best_checkpoints_are_kept(store: CheckpointStore, writer: CheckpointWriter) -> None:
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


def test_a_host_copy_is_independent_of_its_source() -> None:
    copies, origin = HostCopies(torch.device("cpu")), torch.arange(4.0)
    copy = copies.take("a", origin)
    copies.wait()
    origin.zero_()
    assert copy.tolist() == [0, 1, 2, 3]
    again = copies.take("a", origin)
    assert again.data_ptr() == copy.data_ptr(), "the buffer is reused"
    assert copies.take("a", torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_an_error_in_the_writer_thread_is_raised_by_collect(store: CheckpointStore, writer: CheckpointWriter) -> None:
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
    writer.start(2, tensors(2.0), {}, also_keep=set())  # the failure is raised once; there is space again
    assert writer.collect(wait=True)


def test_externally_removed_checkpoints_are_detected_and_a_new_one_saved(
    store: CheckpointStore, writer: CheckpointWriter
) -> None:
    writer.start(1, tensors(1.0), {}, also_keep=set())
    assert writer.collect(wait=True)
    shutil.rmtree(store.root)
    writer.start(2, tensors(2.0), {}, also_keep=set())
    written = writer.collect(wait=True)
    assert written is not None
    assert written.lost == [1]
    assert store.steps() == [2]


def test_a_folder_removed_during_the_write_is_written_again(
    store: CheckpointStore, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    removals = iter([True, False])

    def write_and_lose(folder: Path, groups: Groups, rank: int | None) -> list[Path]:
        files = write_shards(folder, groups, rank=rank)
        if next(removals):
            shutil.rmtree(store.root)
        return files

    monkeypatch.setattr("pantheraml.checkpoint.store.write_shards", write_and_lose)
    writer.start(1, tensors(1.0), {}, also_keep=set())
    written = writer.collect(wait=True)
    assert written is not None
    assert written.failed_once is not None
    assert written.failed_once.startswith("Saving step-00000001 failed: [Errno 2] No such file")
    assert store.load(1).tensors.read_group("weights")["a"].tolist() == [1.0] * 4


def test_writer_does_not_recreate_a_missing_run_folder(store: CheckpointStore, writer: CheckpointWriter) -> None:
    shutil.rmtree(store.root.parent)
    writer.start(1, tensors(1.0), {}, also_keep=set())
    with pytest.raises(StorageError, match="the run folder is gone"):
        writer.collect(wait=True)
    assert not store.root.parent.exists()


ENDLESS = """
import os, sys, torch
from pathlib import Path
from pantheraml.checkpoint.sharded_files import unsharded
from pantheraml.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
for _ in sys.stdin:  # one process per line, which writes until it is killed
    pid = os.fork()
    step = 1
    while pid == 0:
        step += 1
        store.save(step, {"weights": unsharded({"a": torch.full((2_000_000,), float(step))})}, {"step": step})
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


def test_a_kill_during_the_write_leaves_only_intact_checkpoints(
    store: CheckpointStore, endless: subprocess.Popen[str]
) -> None:
    store.save(1, tensors(1.0), {"step": 1})
    assert endless.stdin is not None
    assert endless.stdout is not None
    for _ in range(3):
        store.prune(keep=9, also=set())  # removes leftovers of the last kill
        print(file=endless.stdin, flush=True)
        writer_pid = int(endless.stdout.readline())
        deadline = time.monotonic() + 60
        while not any(store.root.glob(".partial-*/weights.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(writer_pid, signal.SIGKILL)
        assert endless.stdout.readline().strip() == str(-signal.SIGKILL)
        assert store.steps()
        for step in store.steps():
            loaded = store.load(step)
            assert loaded.state == {"step": step}
            assert loaded.tensors.read_group("weights")["a"].eq(step).all()
