"""The one interface behind all sinks: a `Sink` reads events, a `Backend` speaks to one tool.

A backend may be slow or hang (a server that does not answer, retried for minutes), and the process that follows the run
also watches the workers. So every sink sends from a thread of its own: `handle` only puts metrics into a queue, and a
failure there comes back at the next event, where the follower switches the sink off.
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
from pantheraml.base.events import Event, number
from pantheraml.base.folders import write_text
from pantheraml.base.private import private_folder

# After the run has ended, this is how long a sink may take to send what it still holds.
CLOSE_SECONDS = 60.0

# kind of event -> its field -> the name that all tools see
_METRICS: dict[str, dict[str, str]] = {
    "train.step": {
        name: f"train/{name}"
        for name in ("epoch", "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes")
    },
    "eval.done": {name: f"eval/{name}" for name in ("loss", "perplexity")},
}


@dataclass(frozen=True)
class RunIdentity:
    """What a backend needs to know to open its side of the run."""

    run_dir: Path
    project: str
    config: dict[str, Any]
    """The run's config.yaml, flat: {"train.max_steps": 100, ...}; empty where there is none."""
    notices: list[str] = field(default_factory=list)
    """What people should know of how it was opened."""

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    def remembered(self, sink: str) -> str | None:
        """The name that the tool knows this run by, if an earlier start of the run, by this user, wrote it down.

        The folder alone cannot say it: it may be somebody else's, and would have this user's credentials write to a run
        of its choice. So it counts only if this user's own cache says the same of this folder.
        """
        path = self._memory(sink)
        if not path.is_file():
            return None
        known_as = path.read_text(encoding="utf-8", errors="replace").strip()
        if self._own_record().get(sink) == known_as:
            return known_as
        self.notices.append(
            f"{sink} begins a new run: that this folder continues an earlier one is written in the folder alone, not in"
            f" your own records ({self._record()})"
        )
        return None

    def remember(self, sink: str, known_as: str) -> None:
        path, record = self._memory(sink), self._record()
        try:
            path.parent.mkdir(exist_ok=True)
            private_folder(record.parent)
        except OSError as err:
            raise StorageError(f"{path} could not be written: {err.strerror or err}.", where=str(path)) from err
        write_text(record, json.dumps({**self._own_record(), sink: known_as}))
        write_text(path, known_as + "\n")

    def _memory(self, sink: str) -> Path:
        return self.run_dir / "sinks" / f"{sink}.id"

    def _record(self) -> Path:
        """What this user has begun for the folder of that place."""
        place = hashlib.blake2b(os.fsencode(self.run_dir.resolve()), digest_size=16).hexdigest()
        return env.cache_root() / "sinks" / f"{place}.json"

    def _own_record(self) -> dict[str, Any]:
        try:
            found = json.loads(self._record().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


class Backend(Protocol):
    """One tool. Called from one thread."""

    def log(self, step: int, seconds: float, metrics: dict[str, float]) -> None:
        """Metrics of a step; `seconds` since 1970 is when they were measured."""

    def finish(self, status: str) -> None:
        """The run's last word: its status, or 'unknown' when the stream ended without one. Also closes."""


Opener = Callable[[RunIdentity], Backend]

_OPENERS: dict[str, Opener] = {}


def register(name: str) -> Callable[[Opener], Opener]:
    def add(opener: Opener) -> Opener:
        if name in _OPENERS:
            raise ValueError(f"a sink named {name!r} is registered already")
        _OPENERS[name] = opener
        return opener

    return add


def sink_names() -> list[str]:
    return sorted(_OPENERS)


def open_sink(name: str, *, run_dir: Path, project: str) -> Sink:
    """Open the named tool's side of the run in `run_dir`; a resumed run continues where the tool left off."""
    if name not in _OPENERS:
        raise ConfigError(f"There is no sink named {name!r}.", todo=f"Known sinks: {', '.join(sink_names())}.")
    identity = RunIdentity(run_dir, project, _flat_config(run_dir / "config.yaml"))
    return Sink(name, _OPENERS[name](identity), identity.notices)


def require(module: str, *, extra: str) -> Any:
    """Import a tool's package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as err:
        raise MissingExtraError(
            f"The sink {extra!r} needs the package {err.name!r}, which is not installed.",
            where="report.sinks",
            todo=f"pip install 'pantheraml[{extra}]'",
        ) from err


def _flat_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    flat: dict[str, Any] = {}
    todo: list[tuple[str, Any]] = [("", yaml.safe_load(path.read_text(encoding="utf-8")))]
    while todo:
        prefix, value = todo.pop()
        if isinstance(value, dict):
            todo.extend((f"{prefix}.{key}" if prefix else str(key), inner) for key, inner in value.items())
        elif prefix:
            flat[prefix] = value
    return dict(sorted(flat.items()))


def metrics_of(event: Event) -> dict[str, float]:
    """The numbers of a training step or an evaluation, by the names that all tools see."""
    names = _METRICS.get(event["kind"], {})
    found = {shown: number(event[name]) for name, shown in names.items()}
    return {shown: value for shown, value in found.items() if value is not None}


class Sink:
    """A reader that passes metrics on to a backend, from a thread of its own."""

    def __init__(self, name: str, backend: Backend, notices: Sequence[str] = ()) -> None:
        self.name = name
        self.notices = notices
        self._backend = backend
        self._status = "unknown"
        self._failure: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[int, float, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        if self._failure is not None:
            raise self._failure
        if event["kind"] == "run.finished":
            self._status = event["status"]
        metrics = metrics_of(event)
        if metrics:
            self._queue.put((event["step"], event["time"], metrics))

    def close(self) -> None:
        """Send the rest, with patience that ends; then raise what went wrong, if anything did."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.name} did not take the run's last metrics within {CLOSE_SECONDS:.0f} s")
        if self._failure is not None:
            raise self._failure

    def __str__(self) -> str:
        return f"the sink {self.name!r}"

    def _send(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._backend.log(*item)
            self._backend.finish(self._status)
        except Exception as err:  # noqa: BLE001 - third-party code may raise anything; it is raised again in `handle`
            self._failure = err
