"""Start, watch and stop the worker processes of this node, and leave none behind.

Several workers, one per device, run below a process that ends them together (`local_ranks`); a single worker runs
without it. Neither that process nor the parent imports torch. Ctrl-C or a scheduler's signal requests a stop through a
file in the run folder, which the workers check between steps: they save and exit. A second Ctrl-C, or the end of the
grace period, kills them. If the parent dies, the kernel sends SIGTERM to its child, so that an orphaned run saves and
exits too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from pantheraml.base import env, log
from pantheraml.base.errors import HangError, LaunchError
from pantheraml.base.private import private_folder
from pantheraml.launch.script import python_module, ranks_command
from pantheraml.specs.plan import Plan

logger = log.get(__name__)

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Sent by schedulers before they end a job; SIGUSR1 is the usual choice for Slurm's --signal."""
LOG_FILE = "worker.log"
POLL_SECONDS = 0.1
KILL_AFTER_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here rather than in the forked child, where locks of other threads may be held."""


def task_command(task: str, run_dir: Path) -> list[str]:
    """Command of a single worker process."""
    return [*python_module("pantheraml.worker"), task, str(run_dir)]


def command_for(task: str, folder: Path, plan: Plan | None) -> list[str]:
    """Command of the plan's workers: one process that runs them all (`local_ranks`), or the only worker itself."""
    command = task_command(task, folder)
    return command if plan is None or plan.world_size == 1 else ranks_command(plan.world_size, command)


def worker_environment(plan: Plan | None, *, grace_seconds: int | None = None) -> dict[str, str]:
    changes: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": None, **_kernel_cache()}
    if grace_seconds is not None:
        # time that workers have to save once the process above them is terminated
        changes["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_seconds)
    if plan is not None:
        changes["OMP_NUM_THREADS"] = str(plan.threads_per_process)
        changes["TOKENIZERS_PARALLELISM"] = "false"
        if plan.device == "cuda":
            changes["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the numbering of NVML
            changes["CUDA_VISIBLE_DEVICES"] = plan.mig_uuid or ",".join(map(str, plan.device_ids))
        else:
            changes["CUDA_VISIBLE_DEVICES"] = ""
    return env.worker_environment(**changes)


def _kernel_cache() -> dict[str, str]:
    """Variables that put compiled kernels, which are code, into a folder only this user can write."""
    variables = env.kernel_cache()
    for name, folder in variables.items():
        try:
            private_folder(Path(folder))
        except OSError as err:
            variables[name] = _temporary_kernel_cache(folder, err.strerror or str(err))
    return variables


@functools.cache
def _temporary_kernel_cache(instead_of: str, reason: str) -> str:
    folder = tempfile.mkdtemp(prefix="pantheraml-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("compiled kernels are not cached: %s cannot be used: %s", instead_of, reason)
    return folder


class StopRequests:
    """Counts Ctrl-C and preemption signals while installed."""

    def __init__(self) -> None:
        self._received: list[int] = []

    @property
    def count(self) -> int:
        return len(self._received)

    @property
    def first(self) -> signal.Signals | None:
        """The first signal: SIGINT is Ctrl-C by a person; schedulers send others."""
        return signal.Signals(self._received[0]) if self._received else None

    @property
    def urgent(self) -> bool:
        """Ctrl-C after an earlier request: do not wait for the workers to save. A second preemption signal does not
        count, since a scheduler may signal a process both directly and through its group."""
        return self.count > 1 and signal.SIGINT in self._received[1:]

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler."""
        self._received.append(number)

    @contextmanager
    def installed(self) -> Iterator[StopRequests]:
        before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, *PREEMPTION_SIGNALS)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def start_process(
    command: list[str], environment: dict[str, str], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C reaches only the parent; it is terminated with the parent."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except OSError as err:
        raise LaunchError(
            f"A process could not be started: {err}.",
            where=command[0],
            fix="Check the limits of processes and memory (`ulimit -a`) and that the program exists.",
        ) from err


def run_workers(
    command: list[str],
    run_dir: Path,
    *,
    environment: dict[str, str],
    stops: StopRequests,
    ask_to_stop: Callable[[], None] | None,
    grace_seconds: float,
    on_tick: Callable[[], object],
) -> int:
    """Run the workers to the end and return the exit code. `ask_to_stop` is called on the first stop request; if None
    (a task with nothing to save), the workers are terminated at once."""
    with open(run_dir / LOG_FILE, "ab") as log:
        process = start_process(command, environment, log)
    tree = ProcessTree(process.pid)
    try:
        return _watch(process, tree, stops, ask_to_stop, grace_seconds, on_tick)
    except HangError:
        tree.terminate(0.0)  # a hung rank cannot save
        raise
    finally:
        tree.terminate(_termination_seconds(process, stops, grace_seconds))
        process.wait()


def _termination_seconds(process: subprocess.Popen[bytes], stops: StopRequests, grace_seconds: float) -> float:
    """Time between SIGTERM and SIGKILL: enough to save if the agent died, none after a second Ctrl-C."""
    if process.returncode is not None:
        return max(grace_seconds, KILL_AFTER_SECONDS)
    return 0.0 if stops.urgent else KILL_AFTER_SECONDS


def _watch(
    process: subprocess.Popen[bytes],
    tree: ProcessTree,
    stops: StopRequests,
    ask_to_stop: Callable[[], None] | None,
    grace_seconds: float,
    on_tick: Callable[[], object],
) -> int:
    deadline: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
        on_tick()
        if process.returncode is not None:
            return process.returncode
        tree.refresh()
        if stops.count and deadline is None:
            if ask_to_stop is None:
                return 128 + signal.SIGTERM
            ask_to_stop()
            deadline = time.monotonic() + grace_seconds
        if deadline is not None and (stops.urgent or time.monotonic() > deadline):
            return 128 + signal.SIGKILL


class ProcessTree:
    """A process and all its descendants, recorded while it is alive.

    Workers have sessions of their own, so signals to the process group of the one above them do not reach them, and
    once that is dead they can no longer be found through it.
    """

    REFRESH_SECONDS = 1.0

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._members = {self._root}
        self._next_refresh = 0.0

    def refresh(self) -> None:
        if time.monotonic() >= self._next_refresh:
            self._next_refresh = time.monotonic() + self.REFRESH_SECONDS
            with contextlib.suppress(psutil.NoSuchProcess):
                self._members |= set(self._root.children(recursive=True))

    def terminate(self, grace_seconds: float) -> None:
        """Send SIGTERM to the remaining processes, and SIGKILL after `grace_seconds`."""
        self._next_refresh = 0.0
        self.refresh()
        alive = [member for member in self._members if member.is_running()]
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(alive, timeout=grace_seconds)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=KILL_AFTER_SECONDS)


def die_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def was_killed_by_signal(status: int) -> bool:
    """True for an exit by a signal that is not a stop request, such as SIGKILL."""
    return status < 0 and -status not in (signal.SIGINT, *PREEMPTION_SIGNALS)


def explain_death(run_dir: Path, status: int, *, log_from: int = 0) -> str | None:
    """Name the killed rank and the signal, from the log (from byte `log_from` on) or exit code; None: not killed."""
    messages = re.findall(r"^Rank \d+ was killed by SIG.*$", log_tail(run_dir, lines=200, begin=log_from), re.MULTILINE)
    if messages:
        return str(messages[-1])
    if status >= 0:
        return None
    return killed_message("A worker process", signal.Signals(-status))


def killed_message(process: str, by: signal.Signals) -> str:
    hint = " (most often the kernel, out of memory)" if by is signal.SIGKILL else ""
    return f"{process} was killed by {by.name}{hint}."


def log_tail(run_dir: Path, *, lines: int, begin: int = 0) -> str:
    path = run_dir / LOG_FILE
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(begin, os.path.getsize(path) - 65536))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
