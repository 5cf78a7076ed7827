"""A run folder that cannot be written to, or is not there any more: a clear error, and what was saved stays whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pantheraml.base.errors import RunDirectoryError, StorageError
from pantheraml.checkpoint.store import CheckpointStore
from tests.e2e.conftest import Playground, result_of, wait_until

ENDLESS = (
    "--set",
    "train.max_steps=100000",
    "--set",
    "train.schedule=constant",
    "--set",
    "checkpoint.every_steps=1",
    "--set",
    "checkpoint.keep=3",
)


class ReadOnly:
    """Makes folders read-only, for root too: each becomes a mount of itself."""

    def __init__(self) -> None:
        self._mounted: list[Path] = []

    def make(self, folder: Path) -> None:
        subprocess.run(["mount", "--bind", folder, folder], check=True)
        self._mounted.append(folder)
        read_only = ["mount", "-o", "remount,ro,bind", str(folder)]  # refused while somebody writes there
        wait_until(lambda: subprocess.run(read_only, check=False, capture_output=True).returncode == 0, pause=0.002)

    def undo(self) -> None:
        while self._mounted:
            subprocess.run(["umount", "--lazy", self._mounted.pop()], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[ReadOnly]:
    probe = ["mount", "--bind", str(tmp_path), str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(probe, check=False, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    subprocess.run(["umount", tmp_path], check=True)
    mounts = ReadOnly()
    yield mounts
    mounts.undo()


def all_whole(run: Path) -> int:
    """The newest of the checkpoints, each of which can be read."""
    store = CheckpointStore(run / "checkpoints")
    for step in store.steps():
        store.load(step)
    return store.steps()[-1]


@pytest.mark.extended
def test_checkpoints_that_become_read_only(playground: Playground, read_only: ReadOnly) -> None:
    run = playground.root / "runs/sealed"
    process = playground.start_training("runs/sealed", *ENDLESS)
    playground.wait_for_checkpoint("runs/sealed")
    read_only.make(run / "checkpoints")
    ended = result_of(process)
    assert ended.code == StorageError.exit_code, ended
    assert "Read-only file system" in ended.err
    # the words depend on whether it was about to write a checkpoint or to remove one
    assert re.search("earlier saves are intact|the newest checkpoint is intact", ended.err), ended
    assert "Traceback" not in ended.err
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    last = all_whole(run)
    read_only.undo()
    resumed = playground("resume", "runs/sealed", "--set", f"train.max_steps={last + 1}")
    assert resumed.code == 0, resumed


def test_an_output_folder_that_is_read_only(playground: Playground, read_only: ReadOnly, tmp_path: Path) -> None:
    read_only.make(tmp_path)
    ended = playground.train(str(tmp_path / "run"))
    assert ended.code == RunDirectoryError.exit_code, ended
    assert "Read-only file system" in ended.err
    assert "Choose another --output" in ended.err


def test_a_run_folder_that_disappears(playground: Playground) -> None:
    run, elsewhere = playground.root / "runs/gone", playground.root / "runs/elsewhere"
    process = playground.start_training("runs/gone", *ENDLESS)
    playground.wait_for_checkpoint("runs/gone")
    os.rename(run, elsewhere)
    ended = result_of(process)
    assert ended.code == StorageError.exit_code, ended
    assert "The run folder is gone" in ended.err
    assert "Traceback" not in ended.err
    assert not run.exists(), "nothing is made anew in its place"
    all_whole(elsewhere)
