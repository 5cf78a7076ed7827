"""A run folder as its readers see it: events, figures and configuration, of a run that may still be in progress.

`pantheraml report`, `compare` and `watch` read folders of `pantheraml train`, of the service and of trainers in
scripts, of which the last have no config.yaml. Nothing of the folder is executed or trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError, RunDirectoryError
from pantheraml.base.event_stream import FILE_NAME, EventReader
from pantheraml.base.events import EventBase
from pantheraml.base.roots import require_allowed
from pantheraml.readers.summary import History, history, summarize
from pantheraml.specs.config_file import read_yaml


@dataclass(frozen=True)
class RecordedRun:
    path: Path
    events: Sequence[EventBase]
    summary: dict[str, Any]
    past: History
    config: Mapping[str, Any] | None
    """Values by dotted key, as written; None without a readable config.yaml."""
    damaged_lines: int = 0
    """Lines of the event stream that cannot be read; a killed process may leave one."""

    @property
    def name(self) -> str:
        return name_of(self.path)


def name_of(folder: Path) -> str:
    """Name of a run for people; the service calls all folders `run`, in one of the job's name."""
    path = folder.resolve()
    return path.parent.name if path.name == "run" and path.parent.name else path.name


def require_run(path: Path) -> None:
    """RunDirectoryError unless the folder has an event stream, and is one that may be read here."""
    require_allowed(path, key="the run folder")
    fix = "Pass a run folder, as `pantheraml train --output` and the trainers write it."
    if not path.exists():
        raise RunDirectoryError(f"There is no folder {path}.", fix=fix)
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is a file.", fix=fix)
    if not (path / FILE_NAME).is_file():
        raise RunDirectoryError(f"{path} contains no events: it has no {FILE_NAME}.", fix=fix)


def read_run(path: Path) -> RecordedRun:
    require_run(path)
    try:
        reader = EventReader(path)
        events = list(reader.poll())
    except OSError as err:
        raise RunDirectoryError(
            f"{FILE_NAME} cannot be read: {err.strerror}.",
            where=str(path),
            fix="Check that the folder is yours and that its disk is there.",
        ) from err
    if not events:
        raise RunDirectoryError(
            f"{path} contains no events: {FILE_NAME} is empty or damaged.", fix="Pass another run folder."
        )
    config = _config(path / "config.yaml")
    return RecordedRun(path, events, summarize(events), history(events), config, reader.damaged_lines)


def _config(path: Path) -> Mapping[str, Any] | None:
    """Return the config unvalidated: it may be of an earlier version, or from someone else."""
    try:
        values, _ = read_yaml(path)
    except ConfigError:  # none, not YAML, or beyond the bounds of a config file
        return None
    return dict(_flat(values))


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
