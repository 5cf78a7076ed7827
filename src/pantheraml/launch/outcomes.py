"""How a start of a run over several machines ended on each of them, and whether all of them start again.

Every machine tells one outcome; machine 0 judges all of them together, so that the answer is the same everywhere. When
a process dies, those on other machines fail a moment later with errors of their own: the cause is what explains most.
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
from pantheraml.base.events import moment, read_events
from pantheraml.launch.local import NOTICES, was_killed
from pantheraml.specs.run_dir import RunDir

REASONS = {WorkerKilledError.exit_code: "killed", WorkerError.exit_code: "failed", HangError.exit_code: "hung"}
"""Exit codes after which a run may start again, in the words of `parallel.restart_on`."""

STOPS = {signal.SIGINT: InterruptedRunError.exit_code, **dict.fromkeys(NOTICES, PreemptedError.exit_code)}
"""Signals by which somebody asks a run to stop, and the exit code of one that did."""

CONSEQUENCES = (HangError.exit_code, WorkerKilledError.exit_code, WorkerError.exit_code, LaunchError.exit_code)
"""What may be told by those whom somebody else's end has ended, and so is no cause if there is a better one; the
earlier the better. Any other exit code is a cause."""


@dataclass(frozen=True)
class Outcome:
    """How the processes of one machine ended."""

    exit_code: int | None
    """In the words of `base.errors`; None: they were ended because of another machine."""
    told: str = ""

    @property
    def ended_badly(self) -> bool:
        return self.exit_code not in (0, None)

    @classmethod
    def of_ranks(cls, failed: Mapping[int, int]) -> Outcome:
        """`failed` is rank -> status, as `subprocess` has it. Who was killed is the cause, and those who lost their
        connection to it in the same moment are not."""
        rank, status = min(failed.items(), key=lambda item: (item[1] > 0, item[0]))
        if status >= 0:
            died = status == WorkerKilledError.exit_code
            return cls(status, f"Rank {rank} was killed." if died else f"Rank {rank} ended with status {status}.")
        number = signal.Signals(-status)
        return cls(STOPS.get(number, WorkerKilledError.exit_code), was_killed(f"Rank {rank}", number))

    @classmethod
    def of_stop(cls, number: signal.Signals) -> Outcome:
        return cls(STOPS[number], f"Stopped by {number.name}.")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Outcome:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Verdict:
    """What machine 0 decided for all."""

    exit_code: int
    told: str = ""
    starts_again: bool = False
    resumes: bool = False
    """The run has come so far that there is something to continue; if not, the command begins anew."""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Verdict:
        return cls(**json.loads(text))


def cause_of(outcomes: Mapping[int, Outcome | None]) -> Outcome:
    """The outcome that explains the others; None in `outcomes`: that machine said nothing, and is gone."""
    bad = [outcome for outcome in outcomes.values() if outcome is not None and outcome.ended_badly]
    causes = [outcome for outcome in bad if outcome.exit_code not in CONSEQUENCES]
    if causes:
        return causes[0]
    gone = [number for number, outcome in outcomes.items() if outcome is None]
    if gone and (bad or outcomes[0] is None):
        which = f"Machine {gone[0]} is" if len(gone) == 1 else f"Machines {', '.join(map(str, gone))} are"
        return Outcome(WorkerKilledError.exit_code, f"{which} gone.")
    # Where machine 0 ended well all ranks had come to the end and the result is there, whoever is gone since.
    return min(bad, key=lambda outcome: CONSEQUENCES.index(outcome.exit_code or 0), default=Outcome(0))


class Starts:
    """Counts the starts of a run, on machine 0: `max_retries` in a row without a new checkpoint, and no more."""

    def __init__(self, run: RunDir, *, restart_on: Sequence[str], max_retries: int) -> None:
        self._run, self._restart_on, self._max_retries = run, restart_on, max_retries
        self._begin = time.monotonic()
        self._in_vain = 0
        self._reached = run.last_checkpoint()

    def judge(self, outcomes: Mapping[int, Outcome | None]) -> Verdict:
        cause = cause_of(outcomes)
        code = cause.exit_code or 0
        if REASONS.get(code) not in self._restart_on:
            return Verdict(code, cause.told)
        newest = self._run.last_checkpoint()
        if newest != self._reached:
            self._in_vain, self._reached = 0, newest
        self._in_vain += 1
        if self._in_vain > self._max_retries:
            return Verdict(code, cause.told)
        number = f"start {self._in_vain} of {self._max_retries} without a new checkpoint"
        if not self._has_trained():
            return Verdict(code, f"{cause.told} The run begins again ({number}).", starts_again=True)
        start = "the beginning" if newest is None else f"step {newest}"
        told = f"{cause.told} The run goes on from {start} ({number})."
        return Verdict(code, told, starts_again=True, resumes=True)

    def _has_trained(self) -> bool:
        """Since this command began: the folder may hold an older run, which it was told to replace."""
        return any(
            event["kind"] == "train.started" and event["rank"] == 0 and moment(event) >= self._begin
            for event in read_events(self._run.path)
        )
