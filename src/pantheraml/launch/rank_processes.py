"""The ranks that one machine of several runs: started together, watched, ended together, nobody left behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pantheraml.launch.local import KILL_AFTER_SECONDS, POLL_SECONDS, Family, StopRequests, start_process
from pantheraml.launch.outcomes import Outcome

PARTING_SECONDS = 10.0
"""How long ranks may take to notice by themselves that a peer is gone; what they say then is worth waiting for. Those
who wait for it in a collective on a GPU may never notice."""
PRESSING_SECONDS = 0.5
"""Between two signals, so that they arrive in this order."""


@dataclass(frozen=True)
class Watch:
    """What the ranks are ended for, and who is told."""

    stops: StopRequests
    grace_seconds: float
    others_failed: Callable[[], bool]
    """Whether ranks of another machine ended badly."""
    tell: Callable[[Outcome], None]
    """Told the outcome as soon as it is known, when there may still be ranks to end; a stop, once they have ended."""


def run_ranks(command: list[str], environments: Sequence[dict[str, str]], first_rank: int, watch: Watch) -> None:
    """One process of `command` for each of `environments`, numbered from `first_rank` on, until all have ended."""
    processes: list[subprocess.Popen[bytes]] = []
    families: list[Family] = []
    try:
        for environment in environments:
            processes.append(start_process(command, environment))
            families.append(Family(processes[-1].pid))
        outcome = _outcome(processes, families, first_rank, watch)
        if watch.stops.count:
            # ranks of all machines save together: the others must not take these for dead meanwhile
            patience = watch.grace_seconds + KILL_AFTER_SECONDS
            _wait(processes, patience, in_a_hurry=lambda: watch.stops.urgent)
        watch.tell(outcome)
        if outcome.ended_badly and not watch.stops.count:
            _wait(processes, PARTING_SECONDS, in_a_hurry=lambda: watch.stops.count > 0)
    finally:
        _press(processes)
        for family, process in zip(families, processes, strict=True):
            family.end(0.0 if watch.stops.urgent else PARTING_SECONDS)  # a worker of rank 0 may still save
            process.wait()


def _outcome(
    processes: list[subprocess.Popen[bytes]], families: list[Family], first_rank: int, watch: Watch
) -> Outcome:
    """As soon as it is known: all ended well, one did not, somebody wants them to stop, or another machine's failed."""
    others_failed_at: float | None = None
    while True:
        statuses = [process.poll() for process in processes]
        if (number := watch.stops.first) is not None:
            # Ranks but the first take all for the same, and one that has only just started ends by others in silence.
            silent = signal.SIGTERM if number is signal.SIGINT else number
            _signal(processes[:1] if first_rank == 0 else [], number)
            _signal(processes[1:] if first_rank == 0 else processes, silent)
            return Outcome.of_stop(number)
        if any(statuses):
            # once more: who was killed may have been alive when it was asked, and its peers dead when they were
            failed = {first_rank + place: process.poll() for place, process in enumerate(processes)}
            return Outcome.of_ranks({rank: status for rank, status in failed.items() if status})
        if None not in statuses:
            return Outcome(0)
        for family in families:
            family.look()
        now = time.monotonic()
        if others_failed_at is None and watch.others_failed():
            others_failed_at = now
        if others_failed_at is not None and now > others_failed_at + PARTING_SECONDS:
            return Outcome(None)
        time.sleep(POLL_SECONDS)


def _press(processes: list[subprocess.Popen[bytes]]) -> None:
    """They are to end at once: nothing can be saved without the others. Rank 0 takes Ctrl-C after SIGTERM for that,
    ends its worker, and still writes down how it ended."""
    for number, seconds in ((signal.SIGTERM, PRESSING_SECONDS), (signal.SIGINT, KILL_AFTER_SECONDS)):
        if any(process.poll() is None for process in processes):
            _signal(processes, number)
            _wait(processes, seconds)


def _signal(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def _wait(
    processes: list[subprocess.Popen[bytes]], seconds: float, *, in_a_hurry: Callable[[], bool] = lambda: False
) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        while process.poll() is None and time.monotonic() < deadline and not in_a_hurry():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
