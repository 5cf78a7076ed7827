"""The border of a worker process: its exit code says what happened even where its events cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pantheraml.base.errors import ConfigError, StorageError, WorkerError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Notice
from pantheraml.worker.process import run_reporting
from tests.event_log import raw_events


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def full(writer: EventWriter, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(EventWriter, "_append", full)
    return tmp_path


def foreseen(emit: EventWriter) -> None:
    raise ConfigError("A key is wrong.")


def unforeseen(emit: EventWriter) -> None:
    raise ZeroDivisionError("nobody thought of it")


def telling(emit: EventWriter) -> None:
    emit(Notice(message="getting on"))


def test_errors_become_events(tmp_path: Path) -> None:
    assert run_reporting("train", tmp_path, telling) == 0
    assert run_reporting("train", tmp_path, foreseen) == ConfigError.exit_code
    assert run_reporting("train", tmp_path, unforeseen) == WorkerError.exit_code
    messages = [event.get("what") for event in raw_events(tmp_path)]
    assert messages == [None, "A key is wrong.", "The train worker failed: ZeroDivisionError: nobody thought of it."]


def test_exit_code_on_a_full_disk(full_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_reporting("train", full_disk, foreseen) == ConfigError.exit_code
    assert run_reporting("train", full_disk, unforeseen) == WorkerError.exit_code
    assert run_reporting("train", full_disk, telling) == StorageError.exit_code
    err = capfd.readouterr().err
    assert "A key is wrong." in err
    assert "No space left on device" in err
