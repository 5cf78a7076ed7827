"""Common interface of all sinks: a `Sink` reads events, a `Backend` sends metrics to one tracker.

A backend may be slow or hang (an unreachable server, retried for minutes), and the process that follows the run also
watches the workers. So every sink sends from its own thread: `handle` only queues metrics, and a failure is raised at
the next event, where the follower disables the sink.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from pantheraml.base import env
from pantheraml.base.errors import ConfigError, MissingExtraError, StorageError
from pantheraml.base.events import EvalDone, EventBase, RunFinished, TrainStep
from pantheraml.base.folders import write_text
from pantheraml.base.private import private_folder

# Time limit for sending queued metrics after the run has ended.
CLOSE_SECONDS = 60.0

# event class -> field -> metric name in all trackers
_METRICS: dict[type[EventBase], dict[str, str]] = {
    TrainStep: {
        name: f"train/{name}"
        for name in ("epoch", "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes")
    },
    EvalDone: {name: f"eval/{name}" for name in ("loss", "perplexity")},
}


@dataclass(frozen=True)
class RunIdentity:
    """Run folder, project and config, from which a backend opens the tracker run."""

    run_dir: Path
    project: str
    config: dict[str, Any]
    """The run's config.yaml, flattened: {"train.max_steps": 100, ...}; empty if there is none."""
    notices: list[str] = field(default_factory=list)
    """Messages for the user about how the tracker run was opened."""

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    def recorded_id(self, sink: str) -> str | None:
        """Return the tracker's id of this run, if an earlier start by this user recorded it.

        The folder alone is not trusted: it may be someone else's, and would direct this user's credentials to a run of
        its choice. So the id counts only if the user's own cache has the same one for this folder.
        """
        path = self._id_file(sink)
        if not path.is_file():
            return None
        run_id = path.read_text(encoding="utf-8", errors="replace").strip()
        if self._user_record().get(sink) == run_id:
            return run_id
        self.notices.append(
            f"{sink} starts a new run: only the folder itself, not your own records ({self._record_file()}), says that"
            " it continues an earlier one"
        )
        return None

    def record_id(self, sink: str, run_id: str) -> None:
        path, record = self._id_file(sink), self._record_file()
        try:
            path.parent.mkdir(exist_ok=True)
            private_folder(record.parent)
        except OSError as err:
            raise StorageError(
                f"{path} could not be written: {err.strerror or err}.",
                where=str(path),
                fix="Free space on its disk, and check that the folder is yours and writable.",
            ) from err
        write_text(record, json.dumps({**self._user_record(), sink: run_id}))
        write_text(path, run_id + "\n")

    def _id_file(self, sink: str) -> Path:
        return self.run_dir / "sinks" / f"{sink}.id"

    def _record_file(self) -> Path:
        """File with the tracker runs that this user has started for this folder."""
        place = hashlib.blake2b(os.fsencode(self.run_dir.resolve()), digest_size=16).hexdigest()
        return env.cache_root() / "sinks" / f"{place}.json"

    def _user_record(self) -> dict[str, Any]:
        try:
            found = json.loads(self._record_file().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Backend(Protocol):
    """Client of one tracker. Called from one thread."""

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """Log the metrics of a step, measured at `seconds` since 1970."""

    def finish(self, status: str) -> None:
        """Report the final status ('unknown' if the stream ended without one) and close."""


Opener = Callable[[RunIdentity], Backend]

_OPENERS: dict[str, Opener] = {}


def register(name: str) -> Callable[[Opener], Opener]:
    def add(opener: Opener) -> Opener:
        if name in _OPENERS:
            raise ValueError(f"a sink named {name!r} is already registered")
        _OPENERS[name] = opener
        return opener

    return add


def sink_names() -> list[str]:
    return sorted(_OPENERS)


def open_sink(name: str, *, run_dir: Path, project: str) -> Sink:
    """Open the named tracker for the run in `run_dir`; a resumed run continues its tracker run."""
    if name not in _OPENERS:
        raise ConfigError(f"Unknown sink {name!r}.", fix=f"Known sinks: {', '.join(sink_names())}.")
    identity = RunIdentity(run_dir, project, _flat_config(run_dir / "config.yaml"))
    return Sink(name, _OPENERS[name](identity), identity.notices)


def require(module: str, *, extra: str) -> Any:
    """Import a tracker's package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise MissingExtraError(
            f"The sink {extra!r} needs the package {err.name!r}, which is not installed.",
            where="report.sinks",
            fix=f"pip install 'pantheraml[{extra}]'",
        ) from err


def _flat_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    flat: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", yaml.safe_load(path.read_text(encoding="utf-8")))]
    while pending:
        prefix, value = pending.pop()
        if isinstance(value, dict):
            pending.extend((f"{prefix}.{key}" if prefix else str(key), inner) for key, inner in value.items())
        elif prefix:
            flat[prefix] = value
    return dict(sorted(flat.items()))


def metrics_of(event: EventBase) -> dict[str, float]:
    """Return the metrics of a training step or an evaluation; empty for other events."""
    names = _METRICS.get(type(event), {})
    found = {shown: getattr(event, name) for name, shown in names.items()}
    return {shown: float(value) for shown, value in found.items() if value is not None}


class Sink:
    """A reader that sends metrics to a backend from its own thread."""

    def __init__(self, name: str, backend: Backend, notices: Sequence[str] = ()) -> None:
        self.name = name
        self.notices = notices
        self._backend = backend
        self._status = "unknown"
        self._failure: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[int, float, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def handle(self, event: EventBase) -> None:
        if self._failure is not None:
            raise self._failure
        if isinstance(event, RunFinished):
            self._status = event.status
        elif isinstance(event, TrainStep | EvalDone):
            self._queue.put((event.step, event.time, metrics_of(event)))

    def close(self) -> None:
        """Send the rest, up to CLOSE_SECONDS, then raise any failure."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} did not accept the last metrics within {CLOSE_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure

    def __str__(self) -> str:
        return f"the sink {self.name!r}"

    def _send(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._backend.log(*item)
            self._backend.finish(self._status)
        except Exception as err:  # noqa: BLE001 - third-party code may raise anything; `handle` re-raises it
            self._failure = err
