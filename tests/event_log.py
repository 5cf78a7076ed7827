"""Events in tests: as JSON lines, the way other programs read them, and collected from code that emits them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pantheraml.base.event_stream import FILE_NAME
from pantheraml.base.events import EventBase


def raw_events(run_dir: Path) -> list[dict[str, Any]]:
    """Complete lines of a run's events.jsonl."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


class EventLog:
    """An `Emit` that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[EventBase] = []

    def __call__(self, event: EventBase, /) -> None:
        self.events.append(event)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Fields of all events of a kind."""
        return [event.model_dump() for event in self.events if event.kind == kind]

    @property
    def messages(self) -> list[str]:
        """Texts of all notices and warnings."""
        return [str(event.model_dump()["message"]) for event in self.events if event.kind in ("notice", "warning")]
