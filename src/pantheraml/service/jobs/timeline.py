"""GPUs and host over a job's time, from the telemetry in its run folder.

The stream of a long run has hundreds of megabytes, few of them telemetry: other lines are skipped unparsed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pantheraml.base.event_stream import FILE_NAME
from pantheraml.base.events import GPUHealthChanged, HardwareFound, HardwareSampled, parse_event

KINDS = (HardwareFound, HardwareSampled, GPUHealthChanged)
_MARKS = tuple(f'"kind":"{kind.model_fields["kind"].default}"'.encode() for kind in KINDS)
_FIGURES = ("utilization_percent", "memory_bytes", "temperature_celsius", "power_watts", "energy_joules")
MOST_BYTES = 64 << 20
"""Bytes read per request; `cursor` in the answer is where to continue."""
POINTS = 1000


def timeline(folder: Path, after: int) -> dict[str, Any]:
    """Return samples after byte `after` of the stream, and where to continue. `gpus`: GPUs of the host; None:
    unknown."""
    samples: list[dict[str, Any]] = []
    gpus: list[dict[str, Any]] | None = None
    cursor = after
    path = folder / FILE_NAME
    if not path.is_file():
        return {"gpus": None, "samples": [], "cursor": after, "complete": True}
    with open(path, "rb") as stream:
        cursor = after = min(after, path.stat().st_size)  # for any offset that a client sends
        stream.seek(after)
        for line in stream:
            if not line.endswith(b"\n"):  # being written
                break
            cursor += len(line)
            event = _parsed(line) if any(mark in line[:200] for mark in _MARKS) else None
            if isinstance(event, HardwareFound):
                gpus = [
                    gpu.model_dump(include={"index", "name", "total_bytes", "power_limit_watts"}) for gpu in event.gpus
                ]
            elif isinstance(event, HardwareSampled):
                samples.append(_sample(event))
            if cursor - after > MOST_BYTES:
                break
        complete = cursor - after <= MOST_BYTES
    return {"gpus": gpus, "samples": _fewer(samples), "cursor": cursor, "complete": complete}


def _parsed(line: bytes) -> Any:
    try:
        return parse_event(json.loads(line))
    except (ValueError, KeyError, ValidationError):
        return None


def _sample(event: HardwareSampled) -> dict[str, Any]:
    chosen = {name: getattr(event, name) for name in _FIGURES}
    host = {"cpu_percent": event.cpu_percent, "ram_bytes": event.ram_bytes}
    return {"time": event.time, "seconds": event.seconds, "indices": event.indices, **chosen, **host}


def _fewer(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep every n-th sample; each is a mean over its interval already."""
    stride = -(-len(samples) // POINTS)
    return samples if stride <= 1 else samples[stride - 1 :: stride]
