"""The event stream of a run: `events.jsonl`, append-only, one JSON object a line.

Every line has `v` (schema version), `time` (seconds since 1970, by a clock that may be set), `clock` (seconds by the
machine's clock that only goes forward), `rank`, `kind`, and the fields of its kind, listed in `KINDS`. Workers and the
launching parent append to the same file; each line goes out in one locked `write`, so lines never mix. A line that a
crash cut short is closed by the next writer and skipped by readers; nothing else is ever rewritten. Progress bar,
`run.json`, `report.html` and the sinks read this stream and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from pantheraml.base.errors import PantheraError, StorageError
from pantheraml.base.private import lock, open_private

SCHEMA_VERSION = 1
FILE_NAME = "events.jsonl"

Event = dict[str, Any]

# kind -> the fields that every event of that kind carries (more may be added without a new version)
KINDS: Mapping[str, frozenset[str]] = {
    "run.started": frozenset({"command", "pantheraml", "output"}),
    # processes ended and were started again, from the checkpoint of `step` (None: from the beginning)
    "run.restarted": frozenset({"message", "step", "world_size"}),
    # some rank could not use its device, and all agreed that rank 0 goes on alone
    "run.fallback": frozenset({"message", "reason", "planned_world_size"}),
    "run.finished": frozenset({"status", "seconds"}),
    "plan.made": frozenset({"plan"}),
    # one more decision like those of the plan, which could be taken only when the model was there
    "choice": frozenset({"name", "value", "reason", "automatic"}),
    "data.progress": frozenset({"split", "stage", "done", "total", "unit"}),
    "data.ready": frozenset(
        {"split", "format", "rows", "skipped_rows", "truncated_rows", "tokens", "target_tokens", "sequences"}
        | {"seq_len", "packing", "efficiency", "fingerprint", "cached", "seconds"}
    ),
    "model.ready": frozenset({"architecture", "parameters", "trainable_parameters", "precision", "seconds"}),
    "train.started": frozenset({"first_step", "total_steps", "world_size", "device", "global_batch_size"}),
    # tokens, target_tokens and seconds are those since the last event of this kind; the rest is this step's
    "train.step": frozenset(
        {"step", "epoch", "loss", "learning_rate", "grad_norm", "tokens", "target_tokens", "seconds"}
        | {"tokens_per_second", "memory_bytes"}
    ),
    # of each rank in the last step; seconds without waiting for others, None where that is not measured
    "train.ranks": frozenset({"step", "tokens", "seconds", "memory_bytes"}),
    # of every rank, now and then: it gets on
    "heartbeat": frozenset({"step"}),
    # group of parameters (a layer, say) -> grad_norm and weight_norm, now and then
    "train.groups": frozenset({"step", "groups"}),
    # by a signal to this rank, after which all have stopped
    "train.stopped": frozenset({"signal"}),
    "train.finished": frozenset({"steps", "stopped_by"}),
    "eval.progress": frozenset({"step", "done", "total"}),
    "eval.done": frozenset({"step", "loss", "perplexity", "target_tokens", "seconds"}),
    "checkpoint.saved": frozenset({"step", "path", "bytes", "seconds", "best"}),
    "checkpoint.removed": frozenset({"step", "path"}),
    "model.saved": frozenset({"path", "form"}),
    "verdict": frozenset({"step", "action", "cause"}),
    # what a replay of a bad step found, and the file that says more
    "incident": frozenset({"step", "path", "finding", "rank", "module", "tensor", "samples"}),
    "aggregation.left_out": frozenset({"step", "ranks"}),
    "generate.progress": frozenset({"done", "total"}),
    "verify.progress": frozenset({"done", "total", "mode"}),
    "quantise.progress": frozenset({"stage", "done", "total"}),
    "generate.done": frozenset({"prompts", "tokens", "seconds"}),
    "notice": frozenset({"message"}),
    "warning": frozenset({"message"}),
    "error": frozenset({"error", "what", "where", "todo", "exit_code"}),
}


class Emit(Protocol):
    """What a producer of events is handed: it names a kind and its fields, and knows nothing about files."""

    def __call__(self, kind: str, /, **fields: Any) -> None: ...


def silent(kind: str, /, **fields: Any) -> None:
    """An `Emit` for those whom nobody listens to."""


class EventWriter:
    """Appends events to a run's stream. One per process; safe beside other processes' writers."""

    def __init__(self, run_dir: Path, *, rank: int = 0) -> None:
        self._rank = rank
        self._path = run_dir / FILE_NAME
        try:
            self._fd = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as err:
            raise StorageError(f"{FILE_NAME} cannot be opened: {err.strerror}.", where=str(self._path)) from err

    def __call__(self, kind: str, /, **fields: Any) -> None:
        missing = KINDS[kind] - fields.keys()
        assert not missing, f"event {kind} lacks {sorted(missing)}"
        times = {"time": time.time(), "clock": round(time.monotonic(), 6)}
        line = {"v": SCHEMA_VERSION, **times, "rank": self._rank, "kind": kind, **fields}
        data = json.dumps(_finite(line), separators=(",", ":"), default=str).encode() + b"\n"
        try:
            lock(self._fd, self._path)
            self._append(data)
        except OSError as err:
            raise StorageError(
                f"Writing {FILE_NAME} failed: {err.strerror}.",
                where=str(self._path),
                todo="Make room or mend the disk; `pantheraml resume` then goes on from the last checkpoint.",
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


def emit_error(emit: Emit, err: PantheraError, *, traceback: str | None = None) -> None:
    """An error as an event: how it crosses from a worker to the parent, and into the report."""
    emit(
        "error",
        error=type(err).__name__,
        what=err.what,
        where=err.where,
        todo=err.todo,
        exit_code=err.exit_code,
        traceback=traceback,
    )


def _finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite is written as the string 'nan', 'inf' or '-inf'."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


class EventReader:
    """Reads a stream that may still be written: each `poll` yields the complete new lines since the last one."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._offset = 0
        self.damaged_lines = 0

    def skip_to_end(self) -> None:
        """Leave out what is there already, as a resumed run's progress bar does."""
        if self._path.exists():
            for _ in self.poll():
                pass

    def poll(self) -> Iterator[Event]:
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


def _parse(raw: bytes) -> Event | None:
    try:
        event = json.loads(raw)
    except ValueError:
        return None
    if not isinstance(event, dict) or "kind" not in event or not isinstance(event.get("v"), int):
        return None
    return event


def read_events(run_dir: Path) -> list[Event]:
    """All complete events of a run so far."""
    return list(EventReader(run_dir).poll())


def moment(event: Event) -> float:
    """When it was, for the time between two events of one machine: somebody may set its date meanwhile."""
    return float(event["clock"] if "clock" in event else event["time"])


def number(value: Any) -> float | None:
    """A number from an event field: undoes the writing of NaN and infinity as strings; None where there is none."""
    if value is None:
        return None
    return float(value)
