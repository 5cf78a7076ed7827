"""The report's section of bad steps: tensor, rank, samples and their texts, from the files in `incidents/`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pantheraml.base.events import EventBase, IncidentRecorded
from pantheraml.readers import number_format as figures
from pantheraml.readers.report_page import escape, table

MAX_INCIDENTS = 50
MAX_DOCUMENTS = 4
MAX_BYTES = 1 << 22
COLUMNS = ("step", "tensor", "rank", "what", "samples", "documents")


def incidents_part(run_dir: Path, events: Sequence[EventBase]) -> str:
    recorded = [event for event in events if isinstance(event, IncidentRecorded)]
    if not recorded:
        return ""
    rows = [_row(run_dir, event) for event in recorded[-MAX_INCIDENTS:]]
    more = f"The last {MAX_INCIDENTS} of {len(recorded):,}. " if len(recorded) > MAX_INCIDENTS else ""
    note = f"{more}`pantheraml replay RUN_DIR/incidents/step-N.json` runs such a step again."
    return f'<h2>Incidents</h2><p class="soft">{escape(note)}</p>{table(COLUMNS, rows, numbers=frozenset({0}))}'


def _row(run_dir: Path, event: IncidentRecorded) -> tuple[Any, ...]:
    content = _content(run_dir / "incidents" / Path(event.path).name)
    found = content.get("findings")
    ranks = [each.get("rank") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    rank = ", ".join(str(each) for each in dict.fromkeys(ranks)) or figures.UNKNOWN
    tensor = " of ".join(part for part in (event.tensor, event.module) if part) or figures.UNKNOWN
    return event.step, tensor, rank, event.finding, _short(event.samples), _documents(content)


def _content(path: Path) -> dict[str, Any]:
    """Return the content of the file; empty if it is missing, too large or damaged."""
    try:
        if path.is_symlink() or path.stat().st_size > MAX_BYTES:
            return {}
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def _short(value: Any) -> str:
    text = figures.UNKNOWN if value is None else json.dumps(value) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 200 else f"{text[:200]} …"


def _documents(content: dict[str, Any]) -> str:
    origins = content.get("origins")
    groups = [each.get("documents") for each in origins if isinstance(each, dict)] if isinstance(origins, list) else []
    found = [each for group in groups if isinstance(group, list) for each in group if isinstance(each, dict)]
    found.sort(key=lambda each: not each.get("suspect"))
    lines = [_document(each) for each in found[:MAX_DOCUMENTS]]
    return "\n".join(line for line in lines if line) or figures.UNKNOWN


def _document(values: dict[str, Any]) -> str:
    file, number = values.get("file"), values.get("number")
    place = f"{Path(str(file)).name} {values.get('unit')} {number}" if file and number is not None else ""
    return " ".join(part for part in (place, _short(values.get("text")) if values.get("text") else "") if part)
