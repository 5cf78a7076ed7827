"""Run the ranks of a run on one node: start, watch and end them together.

Nothing here imports torch, so the ranks start at once. They meet through a file in a folder that only this user can
access; scripts, which join through `env://`, need a port and run under torch's elastic agent (`rendezvous`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from pantheraml.base import env
from pantheraml.launch.local import POLL_SECONDS, StopRequests, start_process
from pantheraml.launch.outcomes import STOPS, Outcome

FAILURE_SECONDS = 30.0
"""For peers of a rank that failed, which may be writing a checkpoint; torchrun gives them as long."""


def run_local_ranks(command: list[str], processes: int, *, grace_seconds: float) -> Outcome:
    """Run `processes` ranks of `command` until all have exited, one failed, or a signal asked for a stop.

    A stop signal goes on to all ranks, which have `grace_seconds` to save. The outcome has a message if a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="pantheraml-ranks-") as folder, StopRequests().installed() as stops:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for environment in _environments(processes, Path(folder) / "store"):
                ranks.append(start_process(command, environment))
            return _watch(ranks, stops)
        finally:
            _end(ranks, stops, grace_seconds if stops.count else FAILURE_SECONDS)


def _environments(processes: int, store: Path) -> list[dict[str, str]]:
    """Environments of the ranks, as an elastic agent sets them."""
    common = {
        **env.store_variables(env.StoreAddress("127.0.0.1", 0, hosted_by_agent=True, attempt=0)),
        env.STORE_FILE: str(store),
        "PANTHERAML_RUN_TOKEN": env.run_token() or secrets.token_hex(32),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    ranks = [env.ProcessRank(rank, rank, processes, processes) for rank in range(processes)]
    return [env.child_environment(**common, **env.rank_variables(rank)) for rank in ranks]


def _watch(ranks: Sequence[subprocess.Popen[bytes]], stops: StopRequests) -> Outcome:
    while True:
        statuses = [rank.poll() for rank in ranks]
        if stops.first is not None:
            return Outcome(STOPS[stops.first])
        if any(statuses):
            # poll again: the killed rank may have been polled before it died, and its peers after they failed
            failed = {number: rank.poll() for number, rank in enumerate(ranks)}
            return Outcome.of_ranks({number: status for number, status in failed.items() if status})
        if None not in statuses:
            return Outcome(0)
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]], stops: StopRequests, seconds: float) -> None:
    """End the ranks that still run: by the signal that asked for the stop, or SIGTERM; by SIGKILL after `seconds`."""
    for rank in ranks:
        rank.send_signal(stops.first or signal.SIGTERM)  # does nothing if it has exited
    deadline = time.monotonic() + seconds
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline and not stops.urgent:
        time.sleep(POLL_SECONDS / 5)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.kill()
        rank.wait()
