"""Turn the events of a run into those of a job: messages for people, and the figures of each step."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from pantheraml.base import events as run_events
from pantheraml.base.event_stream import describe_damage
from pantheraml.base.events import EventBase
from pantheraml.base.text import printable
from pantheraml.service.store.tables import Event

_ENVELOPE = ("v", "clock", "rank", "kind", "time")
_METRICS = (
    *("loss", "learning_rate", "grad_norm", "epoch", "tokens", "target_tokens", "seconds"),
    *("tokens_per_second", "memory_bytes"),
)

_EXPLAINED = ("step", "action", "cause", "anomaly", "transient", "finding", "module", "tensor", "ranks", "samples")
_MOST_ITEMS = 50

Say = Callable[[Any], str]

_ACTIONS = {
    "step": "taken, with a warning",
    "retry": "run again",
    "zero": "taken without the bad gradients",
    "skip": "skipped",
    "roll_back": "skipped, back to an older checkpoint",
    "stop": "ends the run",
}
"""Decisions of the guard about a step."""

_MESSAGES: dict[type[EventBase], tuple[str, Say]] = {
    run_events.DataReady: ("info", lambda e: f"Data ready ({e.split}): {e.rows} rows, {e.target_tokens} target tokens"),
    run_events.ModelReady: ("info", lambda e: f"Model ready: {e.trainable_parameters:,} trainable parameters"),
    run_events.TrainStarted: (
        "info",
        lambda e: f"Training from step {e.first_step} to {e.total_steps} on {e.world_size} {e.device} process(es)",
    ),
    run_events.TrainStep: ("info", lambda e: f"Step {e.step}: training loss={e.loss:.4f}"),
    run_events.EvalDone: ("info", lambda e: f"Step {e.step}: validation loss={e.loss:.4f}"),
    run_events.CheckpointSaved: ("info", lambda e: f"Checkpoint of step {e.step} saved"),
    run_events.CheckpointRemoved: ("info", lambda e: f"Checkpoint of step {e.step} removed"),
    run_events.ModelSaved: ("info", lambda e: "Trained weights saved"),
    run_events.RunRestarted: ("warn", lambda e: e.message),
    run_events.RunFallback: ("warn", lambda e: e.message),
    run_events.VerdictReached: ("warn", lambda e: f"Step {e.step} {_ACTIONS.get(e.action, e.action)}: {e.cause}"),
    run_events.IncidentRecorded: ("warn", lambda e: f"Step {e.step}: {e.finding}"),
    run_events.Notice: ("info", lambda e: e.message),
    run_events.WarningIssued: ("warn", lambda e: e.message),
    run_events.ErrorRaised: ("error", lambda e: e.what),
}


class PathHider:
    """Replaces this machine's folders in texts that users read: they are for its operator."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Word -> the folder that it replaces."""
        names = {str(path): word for word, folder in folders.items() for path in (folder.absolute(), folder.resolve())}
        self._words = {name: names[name] for name in sorted(names, key=len, reverse=True)}

    def __call__(self, text: str) -> str:
        for name, word in self._words.items():
            text = text.replace(name, word)
        return text


def to_job_event(job_id: str, event: EventBase, hide: Callable[[str], str]) -> Event | None:
    """Return the job's event for an event of its run; None for those that only readers of the run folder need."""
    known = _MESSAGES.get(type(event))
    if known is None or event.rank not in (0, None):
        return None
    level, say = known
    values = event.model_dump()
    return Event(
        job_id=job_id,
        created_at=event.time,
        level=level,
        kind=event.kind,
        message=printable(hide(say(event)))[:2000],
        step=values.get("step"),
        data=_data(event, values, hide),
    )


def damage_event(job_id: str, lines: int) -> Event:
    """Return the event of a job that says that lines of its run's stream cannot be read."""
    return Event(
        job_id=job_id,
        created_at=time.time(),
        level="warn",
        kind="events.damaged",
        message=describe_damage(lines),
        step=None,
        data={"lines": lines},
    )


def energy_of(events: Iterable[EventBase], holders: Mapping[int, int] | None = None) -> float | None:
    """Return a job's part of the energy that its GPUs have used, in joules; None: no GPU, or its driver does not tell.

    `holders`: how many hold each GPU by now, who count with equal parts; None: the job alone.
    """
    samples = [each for each in events if isinstance(each, run_events.HardwareSampled)]
    known = [
        joules / max(1, (holders or {}).get(index, 1))
        for sample in samples
        for index, joules in itertools.zip_longest(sample.indices, sample.energy_joules)
        if joules is not None
    ]
    return sum(known) if known else None


def _data(event: EventBase, values: dict[str, Any], hide: Callable[[str], str]) -> dict[str, Any]:
    """Figures and, of bad steps, what caused them: paths and tracebacks of this machine are for its operator."""
    if isinstance(event, run_events.TrainStep):
        chosen = {name: values[name] for name in _METRICS}
        return {"step": event.step, "train_loss": _finite(event.loss), **{k: _finite(v) for k, v in chosen.items()}}
    if isinstance(event, run_events.EvalDone):
        return {"step": event.step, "valid_loss": _finite(event.loss), "perplexity": _finite(event.perplexity)}
    if isinstance(event, run_events.CheckpointSaved):
        return {"step": event.step, "bytes": event.bytes, "best": event.best}
    if isinstance(event, run_events.VerdictReached | run_events.IncidentRecorded):
        return {name: _told(values[name], hide) for name in _EXPLAINED if name in values}
    return {
        name: value
        for name, value in values.items()
        if name not in _ENVELOPE and isinstance(value, int | float | bool) and _finite(value) is not None
    }


def _told(value: Any, hide: Callable[[str], str]) -> Any:
    """Return the explanation's values, truncated for display."""
    if isinstance(value, dict):
        return {printable(hide(str(key))): _told(inner, hide) for key, inner in list(value.items())[:_MOST_ITEMS]}
    if isinstance(value, list):
        return [_told(inner, hide) for inner in value[:_MOST_ITEMS]]
    return printable(hide(value))[:1000] if isinstance(value, str) else _finite(value)


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return value if not isinstance(value, float) or math.isfinite(value) else None
