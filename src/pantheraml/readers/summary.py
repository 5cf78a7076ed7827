"""`run.json`: what a run came to, folded from its event stream and nothing else.

A resumed run has several legs in one stream, each begun by `run.started`. A leg that repeats steps replaces what
earlier legs said about them, so every step counts once, with the numbers that led to the final weights.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pantheraml.base.errors import WorkerError
from pantheraml.base.events import FILE_NAME as EVENTS
from pantheraml.base.events import SCHEMA_VERSION, Event, moment, number, read_events
from pantheraml.base.folders import write_text

FILE_NAME = "run.json"

# The first steps of a leg compile, allocate and fill caches; they say little about the speed of the rest.
WARM_UP_STEPS = 3

_ENVELOPE = frozenset({"v", "time", "clock", "rank", "kind"})


@dataclass
class _Leg:
    """What one start of the run said, from its `run.started` to the next one."""

    latest: dict[str, Event] = field(default_factory=dict)
    errors: list[Event] = field(default_factory=list)
    data: dict[str, Event] = field(default_factory=dict)
    steps: dict[int, Event] = field(default_factory=dict)
    evals: dict[int, Event] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    last_time: float | None = None
    training_seconds: float = 0.0

    def take(self, event: Event) -> None:
        kind = event["kind"]
        if event["rank"] == 0:  # others may be on another machine
            self._count_time(kind, moment(event))
        self.latest[kind] = event
        if kind == "error":
            self.errors.append(event)
        elif kind == "run.restarted":
            self.errors.clear()  # what went wrong was got over
            self.latest.pop("run.fallback", None)  # devices are asked anew
        elif kind == "data.ready":
            self.data[event["split"]] = event
        elif kind == "train.step":
            self.steps[event["step"]] = event
        elif kind == "eval.done":
            self.evals[event["step"]] = event
        elif kind == "verdict" and event["action"] == "skip":
            self.skipped.add(event["step"])

    def _count_time(self, kind: str, now: float) -> None:
        training = "train.started" in self.latest and "train.finished" not in self.latest
        if training and self.last_time is not None and kind != "run.finished":
            self.training_seconds += max(0.0, now - self.last_time)
        self.last_time = now

    def speeds(self) -> list[float]:
        """Tokens per second of each logged step."""
        return [s for step in sorted(self.steps) if (s := number(self.steps[step]["tokens_per_second"])) is not None]


@dataclass(frozen=True)
class History:
    """A run's steps, evaluations and skipped steps over all its legs, each step once."""

    steps: dict[int, Event]
    evals: dict[int, Event]
    skipped: set[int]


def _legs(events: Iterable[Event]) -> list[_Leg]:
    legs = [_Leg()]
    for event in events:
        if event["kind"] == "run.started" and legs[-1].latest:
            legs.append(_Leg())
        legs[-1].take(event)
    return legs


def _merge(legs: Iterable[_Leg]) -> History:
    steps: dict[int, Event] = {}
    evals: dict[int, Event] = {}
    skipped: set[int] = set()
    for leg in legs:
        if "train.started" in leg.latest:
            first = leg.latest["train.started"]["first_step"]
            steps = {step: event for step, event in steps.items() if step < first}
            evals = {step: event for step, event in evals.items() if step < first}
            skipped = {step for step in skipped if step < first}
        steps |= leg.steps
        evals |= leg.evals
        skipped |= leg.skipped
    return History(dict(sorted(steps.items())), dict(sorted(evals.items())), skipped)


def history(events: Iterable[Event]) -> History:
    """The steps that led to the final weights, in order."""
    return _merge(_legs(events))


def median_speed(starts: Iterable[Sequence[float]]) -> float | None:
    """Of the steps of each start of a run after the warm-up; of all of a start's where there are no others."""
    warm = [speed for speeds in starts for speed in (speeds[WARM_UP_STEPS:] or speeds)]
    return statistics.median(warm) if warm else None


def speeds_of_starts(run_dir: Path) -> list[list[float]]:
    """As the run's stream has them; empty where there is none."""
    return [leg.speeds() for leg in _legs(read_events(run_dir))] if (run_dir / EVENTS).is_file() else []


def summarise(events: Iterable[Event]) -> dict[str, Any]:
    """What `run.json` holds. Unknown is None; a loss that is not finite is the string the stream holds ('nan').

    `final_loss` is the last step's; `concern` says so where the loss ended no better than it began.
    `tokens_per_second` is the median over the logged steps, without the first three of each leg. `seconds` is the wall
    time of training, evaluations and checkpoints included.
    """
    events = list(events)
    legs = _legs(events)
    past = _merge(legs)
    latest: dict[str, Event] = {kind: event for leg in legs for kind, event in leg.latest.items()}
    done = _steps_done(legs[-1], past)
    started, plan = latest.get("train.started", {}), latest.get("plan.made", {}).get("plan", {})
    model, begun = latest.get("model.ready", {}), latest.get("run.started", {})
    steps, evals = list(past.steps.values()), list(past.evals.values())
    memory = [m for step in steps if (m := number(step["memory_bytes"])) is not None]
    finite_evals = [e["loss"] for e in evals if (value := number(e["loss"])) is not None and math.isfinite(value)]
    return {
        "schema_version": SCHEMA_VERSION,
        "status": _status(legs[-1]),
        "error": _error(legs[-1]),
        "steps": done,
        "total_steps": started.get("total_steps"),
        "epochs": steps[-1]["epoch"] if steps else None,
        "first_loss": steps[0]["loss"] if steps else None,
        "final_loss": steps[-1]["loss"] if steps else None,
        "concern": legs[-1].latest.get("train.finished", {}).get("concern"),
        "best_eval_loss": min(finite_evals, default=None),
        "final_eval_loss": evals[-1]["loss"] if evals else None,
        "final_perplexity": evals[-1]["perplexity"] if evals else None,
        "tokens": _total(steps, "tokens"),
        "target_tokens": _total(steps, "target_tokens"),
        "seconds": sum(leg.training_seconds for leg in legs) if started else None,
        "tokens_per_second": median_speed(leg.speeds() for leg in legs),
        "peak_memory_bytes": int(max(memory)) if memory else None,
        "world_size": started.get("world_size", plan.get("world_size")),
        "fallback_reason": legs[-1].latest.get("run.fallback", {}).get("reason"),
        "device": started.get("device", plan.get("device")),
        "precision": model.get("precision", plan.get("precision")),
        "parameters": model.get("parameters"),
        "trainable_parameters": model.get("trainable_parameters"),
        "data": _data(legs),
        "checkpoints": _checkpoints(events),
        "skipped_steps": len(past.skipped),
        "starts": sum(event["kind"] == "run.started" for event in events),
        "started": _iso(next((e["time"] for e in events if e["kind"] == "run.started"), None)),
        "finished": _iso(legs[-1].latest.get("run.finished", {}).get("time")),
        "command": begun.get("command"),
        "pantheraml": begun.get("pantheraml"),
        "output": _fields(latest["model.saved"]) if "model.saved" in latest else None,
    }


def _status(leg: _Leg) -> str | None:
    """An error without `run.finished` is a failure that nobody could write down in time."""
    if "run.finished" in leg.latest:
        return str(leg.latest["run.finished"]["status"])
    if leg.errors:
        return "failed"
    return "running" if leg.latest else None


def _error(leg: _Leg) -> dict[str, Any] | None:
    """The first error of the last leg that somebody foresaw: when one rank fails, its peers fail as a consequence."""
    if not leg.errors:
        return None
    first = next((event for event in leg.errors if event["error"] != WorkerError.__name__), leg.errors[0])
    return {"class": first["error"], **{name: first[name] for name in ("what", "where", "todo", "exit_code")}}


def _total(steps: Sequence[Event], name: str) -> int | None:
    """A sum over the events, each of which covers all steps since the one before it."""
    return sum(step[name] for step in steps) if steps else None


def _steps_done(last: _Leg, past: History) -> int | None:
    """Optimizer steps completed; the last ones may have gone unlogged, but `train.finished` knows."""
    if "train.finished" in last.latest:
        return int(last.latest["train.finished"]["steps"])
    return max(past.steps, default=None)


def _data(legs: Iterable[_Leg]) -> dict[str, Any]:
    return {split: _fields(event) for leg in legs for split, event in leg.data.items()}


def _fields(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in _ENVELOPE}


def _checkpoints(events: Iterable[Event]) -> list[int]:
    kept: set[int] = set()
    for event in events:
        if event["kind"] == "checkpoint.saved":
            kept.add(event["step"])
        elif event["kind"] == "checkpoint.removed":
            kept.discard(event["step"])
    return sorted(kept)


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def write_run_json(run_dir: Path, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Fold the run's events, lay `extra` over the result and write it whole or not at all."""
    summary = {**summarise(read_events(run_dir)), **(extra or {})}
    write_text(run_dir / FILE_NAME, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return summary
