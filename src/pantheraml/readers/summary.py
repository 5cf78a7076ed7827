"""`run.json`: the result of a run, computed from its event stream alone.

A resumed run has several starts in one stream, each with its `run.started`. A start that repeats steps replaces earlier
events of these steps, so every step counts once, with the numbers that led to the final weights.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pantheraml.base.errors import WorkerError
from pantheraml.base.event_stream import FILE_NAME as EVENTS
from pantheraml.base.event_stream import read_events
from pantheraml.base.events import (
    SCHEMA_VERSION,
    CheckpointRemoved,
    CheckpointSaved,
    DataReady,
    ErrorRaised,
    EvalDone,
    EventBase,
    HardwareSampled,
    ModelReady,
    ModelSaved,
    PlanMade,
    RunFallback,
    RunFinished,
    RunRestarted,
    RunStarted,
    TrainFinished,
    TrainStarted,
    TrainStep,
    VerdictReached,
)
from pantheraml.base.folders import write_text
from pantheraml.readers import hardware

FILE_NAME = "run.json"

# The first steps of a start compile, allocate and fill caches, and are slower than the rest.
WARM_UP_STEPS = 3

_ENVELOPE = {"v", "time", "clock", "rank", "kind"}

_Event = TypeVar("_Event", bound=EventBase)


@dataclass
class _Start:
    """Events of one start of the run, from its `run.started` to the next one."""

    latest: dict[type[EventBase], EventBase] = field(default_factory=dict)
    errors: list[ErrorRaised] = field(default_factory=list)
    data: dict[str, DataReady] = field(default_factory=dict)
    steps: dict[int, TrainStep] = field(default_factory=dict)
    evals: dict[int, EvalDone] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    last_time: float | None = None
    training_seconds: float = 0.0

    def last(self, kind: type[_Event]) -> _Event | None:
        """Return the latest event of a kind."""
        found = self.latest.get(kind)
        return found if isinstance(found, kind) else None

    def add(self, event: EventBase) -> None:
        if event.rank == 0:  # other ranks may be on another host, with another clock
            self._count_time(event)
        self.latest[type(event)] = event
        if isinstance(event, ErrorRaised):
            self.errors.append(event)
        elif isinstance(event, RunRestarted):
            self.errors.clear()  # the run recovered
            self.latest.pop(RunFallback, None)  # devices are probed again
        elif isinstance(event, DataReady):
            self.data[event.split] = event
        elif isinstance(event, TrainStep):
            self.steps[event.step] = event
        elif isinstance(event, EvalDone):
            self.evals[event.step] = event
        elif isinstance(event, VerdictReached) and event.action == "skip":
            self.skipped.add(event.step)

    def _count_time(self, event: EventBase) -> None:
        training = TrainStarted in self.latest and TrainFinished not in self.latest
        if training and self.last_time is not None and not isinstance(event, RunFinished):
            self.training_seconds += max(0.0, event.moment - self.last_time)
        self.last_time = event.moment

    def speeds(self) -> list[float]:
        """Tokens per second of each logged step."""
        ordered = (self.steps[step].tokens_per_second for step in sorted(self.steps))
        return [speed for speed in ordered if speed is not None]


@dataclass(frozen=True)
class History:
    """Steps, evaluations and skipped steps of all starts of a run, each step once."""

    steps: dict[int, TrainStep]
    evals: dict[int, EvalDone]
    skipped: set[int]


def _starts(events: Iterable[EventBase]) -> list[_Start]:
    starts = [_Start()]
    for event in events:
        if isinstance(event, RunStarted) and starts[-1].latest:
            starts.append(_Start())
        starts[-1].add(event)
    return starts


def _merge(starts: Iterable[_Start]) -> History:
    steps: dict[int, TrainStep] = {}
    evals: dict[int, EvalDone] = {}
    skipped: set[int] = set()
    for start in starts:
        if (begun := start.last(TrainStarted)) is not None:
            steps = {step: event for step, event in steps.items() if step < begun.first_step}
            evals = {step: event for step, event in evals.items() if step < begun.first_step}
            skipped = {step for step in skipped if step < begun.first_step}
        steps |= start.steps
        evals |= start.evals
        skipped |= start.skipped
    return History(dict(sorted(steps.items())), dict(sorted(evals.items())), skipped)


def history(events: Iterable[EventBase]) -> History:
    """Return the steps that led to the final weights, in order."""
    return _merge(_starts(events))


def median_speed(starts: Iterable[Sequence[float]]) -> float | None:
    """Median over the steps after the warm-up of each start; of a shorter start, over all its steps."""
    warm = [speed for speeds in starts for speed in (speeds[WARM_UP_STEPS:] or speeds)]
    return statistics.median(warm) if warm else None


def _median_step_seconds(starts: Iterable[_Start]) -> float | None:
    """Median seconds of a step, of the steps that `median_speed` counts."""
    warm: list[float] = []
    for start in starts:
        numbers = sorted(start.steps)
        # an event covers all steps since the one before
        seconds = [start.steps[now].seconds / (now - before) for before, now in pairwise(numbers)]
        warm += seconds[WARM_UP_STEPS - 1 :] or seconds
    return statistics.median(warm) if warm else None


def speeds_of_starts(run_dir: Path) -> list[list[float]]:
    """Tokens per second of each start in the run's stream; empty if there is no stream."""
    return [start.speeds() for start in _starts(read_events(run_dir))] if (run_dir / EVENTS).is_file() else []


def summarize(events: Iterable[EventBase]) -> dict[str, Any]:
    """Return the content of `run.json`; unknown values are None.

    `final_loss` is the last step's; `concern` is set if the loss ended no better than it started. `tokens_per_second`
    is the median over the logged steps, without the first three of each start. `seconds` is the wall time of training,
    including evaluations and checkpoints. Utilization and energy are those of the GPUs over the whole run.
    Predictions are those of the plan.
    """
    events = list(events)
    starts = _starts(events)
    past, last = _merge(starts), starts[-1]
    training, plan_made = _newest(starts, TrainStarted), _newest(starts, PlanMade)
    plan = {} if plan_made is None else plan_made.plan
    model, begun, saved = _newest(starts, ModelReady), _newest(starts, RunStarted), _newest(starts, ModelSaved)
    ended, fallback, finished = last.last(TrainFinished), last.last(RunFallback), last.last(RunFinished)
    steps, evals = list(past.steps.values()), list(past.evals.values())
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    sampled = [event for event in events if isinstance(event, HardwareSampled)]
    began = [event.time for event in events if isinstance(event, RunStarted)]
    return {
        "schema_version": SCHEMA_VERSION,
        "status": _status(last),
        "error": _error(last),
        "steps": max(past.steps, default=None) if ended is None else ended.steps,
        "total_steps": training and training.total_steps,
        "epochs": steps[-1].epoch if steps else None,
        "first_loss": steps[0].loss if steps else None,
        "final_loss": steps[-1].loss if steps else None,
        "concern": ended and ended.concern,
        "best_eval_loss": min((done.loss for done in evals if math.isfinite(done.loss)), default=None),
        "final_eval_loss": evals[-1].loss if evals else None,
        "final_perplexity": evals[-1].perplexity if evals else None,
        "tokens": sum(step.tokens for step in steps) if steps else None,
        "target_tokens": sum(step.target_tokens for step in steps) if steps else None,
        "seconds": sum(start.training_seconds for start in starts) if training else None,
        "tokens_per_second": median_speed(start.speeds() for start in starts),
        "step_seconds": _median_step_seconds(starts),
        "predicted_step_seconds": (plan.get("prediction") or {}).get("step_seconds"),
        "peak_memory_bytes": max(memory, default=None),
        "reserved_memory_bytes": ended and ended.reserved_bytes,
        "predicted_memory_bytes": plan.get("predicted_memory_bytes"),
        "gpu_utilization_percent": hardware.mean_utilization(sampled),
        "energy_joules": hardware.energy_joules(sampled),
        "world_size": training.world_size if training else plan.get("world_size"),
        "fallback_reason": fallback and fallback.reason,
        "device": training.device if training else plan.get("device"),
        "precision": model.precision if model else plan.get("precision"),
        "parameters": model and model.parameters,
        "trainable_parameters": model and model.trainable_parameters,
        "data": {split: _fields(event) for start in starts for split, event in start.data.items()},
        "checkpoints": _checkpoints(events),
        "skipped_steps": len(past.skipped),
        "starts": len(began),
        "started": _iso(began[0] if began else None),
        "finished": _iso(finished.time if finished else None),
        "command": begun and begun.command,
        "pantheraml": begun and begun.pantheraml,
        "output": None if saved is None else _fields(saved),
    }


def _newest(starts: Sequence[_Start], kind: type[_Event]) -> _Event | None:
    return next((event for start in reversed(starts) if (event := start.last(kind)) is not None), None)


def _status(start: _Start) -> str | None:
    """Status of a start; an error without `run.finished` means that the run ended before it could write one."""
    if (finished := start.last(RunFinished)) is not None:
        return finished.status
    if start.errors:
        return "failed"
    return "running" if start.latest else None


def _error(start: _Start) -> dict[str, Any] | None:
    """Return the first error other than WorkerError: if one rank fails, its peers fail as a consequence."""
    if not start.errors:
        return None
    first = next((event for event in start.errors if event.error != WorkerError.__name__), start.errors[0])
    return {
        "class": first.error,
        "what": first.what,
        "where": first.where,
        "fix": first.fix,
        "todo": first.fix,  # deprecated name of `fix`
        "exit_code": first.exit_code,
    }


def _fields(event: EventBase) -> dict[str, Any]:
    return event.model_dump(exclude=_ENVELOPE)


def _checkpoints(events: Iterable[EventBase]) -> list[int]:
    kept: set[int] = set()
    for event in events:
        if isinstance(event, CheckpointSaved):
            kept.add(event.step)
        elif isinstance(event, CheckpointRemoved):
            kept.discard(event.step)
    return sorted(kept)


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def write_run_json(run_dir: Path, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Summarize the run's events, merge `extra`, and write run.json atomically. NaN becomes the string 'nan'."""
    summary: dict[str, Any] = as_json({**summarize(read_events(run_dir)), **(extra or {})})
    write_text(run_dir / FILE_NAME, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return summary


def as_json(value: Any) -> Any:
    """NaN and infinities as the strings 'nan', 'inf' and '-inf', since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {name: as_json(each) for name, each in value.items()}
    return [as_json(each) for each in value] if isinstance(value, list | tuple) else value
