"""Run the ranks of one node of a multi-node run: start, watch and end them together, and leave none behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pantheraml.launch.local import KILL_AFTER_SECONDS, POLL_SECONDS, ProcessTree, StopRequests, start_process
from pantheraml.launch.outcomes import Outcome

FAILURE_SECONDS = 10.0
"""Time for ranks to notice a lost peer and report their own error. A rank inside a GPU collective may never notice."""
SIGNAL_GAP_SECONDS = 0.5
"""Delay between two signals, so that they arrive in order."""


@dataclass(frozen=True)
class RankWatch:
    """Reasons to end the ranks, and the callback for their outcome."""

    stops: StopRequests
    grace_seconds: float
    others_failed: Callable[[], bool]
    """True once ranks of another node failed."""
    report: Callable[[Outcome], None]
    """Called with the outcome as soon as it is known, possibly before all ranks exited; with a stop, after they did."""


def run_ranks(command: list[str], environments: Sequence[dict[str, str]], first_rank: int, watch: RankWatch) -> None:
    """Run one process of `command` per environment, with ranks from `first_rank` on, until all have exited."""
    processes: list[subprocess.Popen[bytes]] = []
    trees: list[ProcessTree] = []
    try:
        for environment in environments:
            processes.append(start_process(command, environment))
            trees.append(ProcessTree(processes[-1].pid))
        outcome = _outcome(processes, trees, first_rank, watch)
        if watch.stops.count:
            # ranks of all nodes save together: the other nodes must not take these for dead meanwhile
            timeout = watch.grace_seconds + KILL_AFTER_SECONDS
            _wait(processes, timeout, give_up=lambda: watch.stops.urgent)
        watch.report(outcome)
        if outcome.is_failure and not watch.stops.count:
            _wait(processes, FAILURE_SECONDS, give_up=lambda: watch.stops.count > 0)
    finally:
        _interrupt(processes)
        for tree, process in zip(trees, processes, strict=True):
            tree.terminate(0.0 if watch.stops.urgent else FAILURE_SECONDS)  # the worker of rank 0 may still save
            process.wait()


def _outcome(
    processes: list[subprocess.Popen[bytes]], trees: list[ProcessTree], first_rank: int, watch: RankWatch
) -> Outcome:
    """Wait until all ranks succeeded, one failed, a stop was requested, or ranks of another node failed."""
    others_failed_at: float | None = None
    while True:
        statuses = [process.poll() for process in processes]
        if (number := watch.stops.first) is not None:
            # Ranks other than 0 treat all stop signals alike, but SIGINT prints a traceback if they have just started.
            quiet = signal.SIGTERM if number is signal.SIGINT else number
            _signal(processes[:1] if first_rank == 0 else [], number)
            _signal(processes[1:] if first_rank == 0 else processes, quiet)
            return Outcome.of_stop(number)
        if any(statuses):
            # poll again: the killed rank may have been polled before it died, and its peers after they failed
            failed = {first_rank + index: process.poll() for index, process in enumerate(processes)}
            return Outcome.of_ranks({rank: status for rank, status in failed.items() if status})
        if None not in statuses:
            return Outcome(0)
        for tree in trees:
            tree.refresh()
        now = time.monotonic()
        if others_failed_at is None and watch.others_failed():
            others_failed_at = now
        if others_failed_at is not None and now > others_failed_at + FAILURE_SECONDS:
            return Outcome(None)
        time.sleep(POLL_SECONDS)


def _interrupt(processes: list[subprocess.Popen[bytes]]) -> None:
    """End ranks at once: without the other nodes, nothing can be saved. On SIGTERM followed by SIGINT, rank 0 kills its
    worker and still records how the run ended."""
    for number, seconds in ((signal.SIGTERM, SIGNAL_GAP_SECONDS), (signal.SIGINT, KILL_AFTER_SECONDS)):
        if any(process.poll() is None for process in processes):
            _signal(processes, number)
            _wait(processes, seconds)


def _signal(processes: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


def _wait(
    processes: list[subprocess.Popen[bytes]], seconds: float, *, give_up: Callable[[], bool] = lambda: False
) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        while process.poll() is None and time.monotonic() < deadline and not give_up():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
