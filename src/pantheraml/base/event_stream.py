"""The event stream of a run: `events.jsonl`, append-only, one JSON object a line (`events` has the models).

Workers and the supervisor append to the same file. Each line is one locked `write`, so lines never mix. A line that a
crash cut short is closed by the next writer and skipped by readers; nothing else is ever rewritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from pantheraml.base.errors import StorageError
from pantheraml.base.events import EventBase, parse_event
from pantheraml.base.private import lock, open_private

FILE_NAME = "events.jsonl"


class EventWriter:
    """Appends events to a run's stream. One per process; safe beside other processes' writers."""

    def __init__(self, run_dir: Path, *, rank: int = 0) -> None:
        self._rank = rank
        self._path = run_dir / FILE_NAME
        try:
            self._fd = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as err:
            raise StorageError(
                f"{FILE_NAME} cannot be opened: {err.strerror}.",
                where=str(self._path),
                fix="Check that the run folder is yours and that its disk is there and writable.",
            ) from err

    def __call__(self, event: EventBase, /) -> None:
        event.time, event.clock = time.time(), round(time.monotonic(), 6)
        if "rank" not in event.model_fields_set:  # an incident names the rank that caused it
            event.rank = self._rank
        data = event.model_dump_json().encode() + b"\n"
        try:
            lock(self._fd, self._path)
            self._append(data)
        except OSError as err:
            raise StorageError(
                f"Writing {FILE_NAME} failed: {err.strerror}.",
                where=str(self._path),
                fix="Free space or repair the disk; `pantheraml resume` then continues from the last checkpoint.",
            ) from err
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _append(self, data: bytes) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_END)
        if end and os.pread(self._fd, 1, end - 1) != b"\n":
            data = b"\n" + data
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class EventReader:
    """Reads a stream that may still be written: each `poll` yields the complete new lines since the last one."""

    def __init__(self, run_dir: Path, *, offset: int = 0) -> None:
        """`offset`: where an earlier reader stopped."""
        self._path = run_dir / FILE_NAME
        self._offset = offset
        self.damaged_lines = 0

    @property
    def offset(self) -> int:
        """Bytes up to the end of the last line that was read."""
        return self._offset

    def skip_to_end(self) -> None:
        """Skip what is there already, as a resumed run's progress bar does."""
        if self._path.exists():
            for _ in self.poll():
                pass

    def poll(self) -> Iterator[EventBase]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # still being written, or cut short; a later writer closes it
                self._offset += len(raw)
                event = _parse(raw)
                if event is not None:
                    yield event
                elif raw.strip():
                    self.damaged_lines += 1


def _parse(raw: bytes) -> EventBase | None:
    try:
        values = json.loads(raw)
        if (
            not isinstance(values, dict)
            or not isinstance(values.get("kind"), str)
            or not isinstance(values.get("v"), int)
        ):
            return None
        return parse_event(values)
    except (ValueError, ValidationError, RecursionError):
        return None


def describe_damage(lines: int) -> str:
    """Say that so many lines were skipped."""
    return (
        f"{lines:,} line(s) of {FILE_NAME} cannot be read, and what they said is missing: a killed process leaves one."
    )


def read_events(run_dir: Path) -> list[EventBase]:
    """All complete events of a run so far."""
    return list(EventReader(run_dir).poll())
