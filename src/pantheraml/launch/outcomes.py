"""Outcome of a multi-node run on each node, and the decision whether all nodes restart.

Every node reports one outcome; node 0 decides for all, so that the decision is the same everywhere. When a process
dies, ranks on other nodes fail a moment later with errors of their own, so the root cause has to be picked out.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pantheraml.base.errors import (
    HangError,
    InterruptedRunError,
    LaunchError,
    PreemptedError,
    WorkerError,
    WorkerKilledError,
)
from pantheraml.base.event_stream import read_events
from pantheraml.base.events import TrainStarted
from pantheraml.launch.local import PREEMPTION_SIGNALS, killed_message
from pantheraml.specs.run_dir import RunDir

REASONS = {WorkerKilledError.exit_code: "killed", WorkerError.exit_code: "failed", HangError.exit_code: "hung"}
"""Exit codes that allow a restart, and their names in `parallel.restart_on`."""

STOPS = {signal.SIGINT: InterruptedRunError.exit_code, **dict.fromkeys(PREEMPTION_SIGNALS, PreemptedError.exit_code)}
"""Signals that request a stop, and the exit code of a run stopped by each."""

CONSEQUENCES = (HangError.exit_code, WorkerKilledError.exit_code, WorkerError.exit_code, LaunchError.exit_code)
"""Exit codes that may only be a consequence of another node's failure, from the most to the least likely root cause.
Any other exit code is a root cause."""


@dataclass(frozen=True)
class Outcome:
    """Result of the ranks of one node."""

    exit_code: int | None
    """As in `base.errors`; None: ended because another node failed."""
    message: str = ""

    @property
    def is_failure(self) -> bool:
        return self.exit_code not in (0, None)

    @classmethod
    def of_ranks(cls, failed: Mapping[int, int]) -> Outcome:
        """`failed`: return codes by rank, as in `subprocess`. A killed rank is the cause; ranks that lost their
        connection to it at the same moment are not."""
        rank, status = min(failed.items(), key=lambda item: (item[1] > 0, item[0]))
        if status >= 0:
            killed = status == WorkerKilledError.exit_code
            return cls(status, f"Rank {rank} was killed." if killed else f"Rank {rank} exited with code {status}.")
        number = signal.Signals(-status)
        return cls(STOPS.get(number, WorkerKilledError.exit_code), killed_message(f"Rank {rank}", number))

    @classmethod
    def of_stop(cls, number: signal.Signals) -> Outcome:
        return cls(STOPS[number], f"Stopped by {number.name}.")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class RestartDecision:
    """Decision of node 0 for all nodes."""

    exit_code: int
    message: str = ""
    restarts_run: bool = False
    resumes: bool = False
    """The restart resumes the run; False: training had not begun, so the command starts over."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RestartDecision:
        return cls(**json.loads(text))


def cause_of(outcomes: Mapping[int, Outcome | None]) -> Outcome:
    """Return the root cause. An outcome of None: that node reported nothing and is unreachable."""
    failures = [outcome for outcome in outcomes.values() if outcome is not None and outcome.is_failure]
    causes = [outcome for outcome in failures if outcome.exit_code not in CONSEQUENCES]
    if causes:
        return causes[0]
    gone = [number for number, outcome in outcomes.items() if outcome is None]
    if gone and (failures or outcomes[0] is None):
        nodes = f"Node {gone[0]} is" if len(gone) == 1 else f"Nodes {', '.join(map(str, gone))} are"
        return Outcome(WorkerKilledError.exit_code, f"{nodes} unreachable.")
    # If node 0 succeeded, all ranks reached the end and the result is saved, whichever node was lost since.
    return min(failures, key=lambda outcome: CONSEQUENCES.index(outcome.exit_code or 0), default=Outcome(0))


class NodeRestarts:
    """Restart policy of a multi-node run, on node 0: at most `max_retries` in a row without a new checkpoint."""

    def __init__(self, run: RunDir, *, restart_on: Sequence[str], max_retries: int) -> None:
        self._run, self._restart_on, self._max_retries = run, restart_on, max_retries
        self._begin = time.monotonic()
        self._failed_starts = 0
        """In a row, without a new checkpoint."""
        self._last_checkpoint = run.last_checkpoint()

    def decide(self, outcomes: Mapping[int, Outcome | None]) -> RestartDecision:
        cause = cause_of(outcomes)
        code = cause.exit_code or 0
        if REASONS.get(code) not in self._restart_on:
            return RestartDecision(code, cause.message)
        newest = self._run.last_checkpoint()
        if newest != self._last_checkpoint:
            self._failed_starts, self._last_checkpoint = 0, newest
        self._failed_starts += 1
        if self._failed_starts > self._max_retries:
            return RestartDecision(code, cause.message)
        count = f"restart {self._failed_starts} of {self._max_retries} without a new checkpoint"
        if not self._has_trained():
            return RestartDecision(code, f"{cause.message} Starting over ({count}).", restarts_run=True)
        start = "the beginning" if newest is None else f"step {newest}"
        message = f"{cause.message} Resuming from {start} ({count})."
        return RestartDecision(code, message, restarts_run=True, resumes=True)

    def _has_trained(self) -> bool:
        """True if training began since this command started: the folder may hold an older run, to be replaced."""
        return any(
            isinstance(event, TrainStarted) and event.rank == 0 and event.moment >= self._begin
            for event in read_events(self._run.path)
        )
