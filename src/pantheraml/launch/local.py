"""Worker processes on this machine: started, watched, stopped in order, never left behind.

Several processes run under torch's elastic agent, one per device; one alone runs by itself. The parent that calls this
never imports torch. Ctrl-C or a scheduler's notice asks the workers to save and leave (a file in the run folder, which
they look at between steps); a second Ctrl-C, or the end of the grace period, kills them. If the parent itself dies, the
kernel sends SIGTERM to the child, so that an orphaned run saves and ends too.
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
from pantheraml.launch.script import agent_command, python_module
from pantheraml.specs.plan import Plan

logger = log.get(__name__)

NOTICES = (signal.SIGTERM, signal.SIGUSR1)
"""By which schedulers say that a run has to leave soon: SIGUSR1 is what people choose with Slurm's --signal."""
LOG_FILE = "worker.log"
POLL_SECONDS = 0.1
KILL_AFTER_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here and not in the forked child, where other threads may hold locks."""


def task_command(task: str, run_dir: Path) -> list[str]:
    """A single worker process for one task."""
    return [*python_module("pantheraml.worker"), task, str(run_dir)]


def command_for(task: str, folder: Path, plan: Plan | None) -> list[str]:
    """One worker per process of the plan, under the elastic agent; one alone needs none, and starts sooner."""
    command = task_command(task, folder)
    return command if plan is None or plan.world_size == 1 else agent_command(plan.world_size, command)


def worker_environment(plan: Plan | None, *, grace_seconds: int | None = None) -> dict[str, str]:
    changes: dict[str, str | None] = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": None, **_kernel_cache()}
    if grace_seconds is not None:
        # how long the agent lets workers save when it is told to end; torch before 2.13 always gives them 30 s
        changes["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(grace_seconds)
    if plan is not None:
        changes["OMP_NUM_THREADS"] = str(plan.threads_per_process)
        changes["TOKENIZERS_PARALLELISM"] = "false"
        if plan.device == "cuda":
            changes["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order in which NVML numbers them
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.device_ids))
        else:
            changes["CUDA_VISIBLE_DEVICES"] = ""
    return env.worker_environment(**changes)


def _kernel_cache() -> dict[str, str]:
    """A folder that nobody else can put kernels into: they are code."""
    found = env.kernel_cache()
    for name, folder in found.items():
        try:
            private_folder(Path(folder))
        except OSError as err:
            found[name] = _fresh_kernel_cache(folder, err.strerror or str(err))
    return found


@functools.cache
def _fresh_kernel_cache(instead_of: str, reason: str) -> str:
    folder = tempfile.mkdtemp(prefix="pantheraml-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("compiled kernels are not kept: %s cannot be used, as %s", instead_of, reason)
    return folder


class StopRequests:
    """Counts Ctrl-C and the notices of schedulers while it is installed."""

    def __init__(self) -> None:
        self._received: list[int] = []

    @property
    def count(self) -> int:
        return len(self._received)

    @property
    def first(self) -> signal.Signals | None:
        """What it began with: SIGINT is Ctrl-C, by a person; schedulers send others."""
        return signal.Signals(self._received[0]) if self._received else None

    @property
    def urgent(self) -> bool:
        """Somebody pressed Ctrl-C and does not want to wait for what the first request began. (A second notice is not
        meant like that: a scheduler may signal a process both by itself and with its group.)"""
        return self.count > 1 and signal.SIGINT in self._received[1:]

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """A signal, as Python hands it over."""
        self._received.append(number)

    @contextmanager
    def installed(self) -> Iterator[StopRequests]:
        before = {number: signal.signal(number, self.receive) for number in (signal.SIGINT, *NOTICES)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def start_process(
    command: list[str], environment: dict[str, str], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C in the terminal reaches the parent alone, with which it ends."""
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
        raise LaunchError(f"A process could not be started: {err}.", where=command[0]) from err


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
    """Run to the end and return the exit status. `ask_to_stop` is called on the first stop request; without it (a task
    that has nothing to save) the workers are terminated at once."""
    with open(run_dir / LOG_FILE, "ab") as log:
        process = start_process(command, environment, log)
    family = Family(process.pid)
    try:
        return _watch(process, family, stops, ask_to_stop, grace_seconds, on_tick)
    except HangError:
        family.end(0.0)  # who does not get on does not hear that it should save
        raise
    finally:
        family.end(_parting_seconds(process, stops, grace_seconds))
        process.wait()


def _parting_seconds(process: subprocess.Popen[bytes], stops: StopRequests, grace_seconds: float) -> float:
    """How long those who are left may take: enough to save if their parent died, nothing if somebody is in a hurry."""
    if process.returncode is not None:
        return max(grace_seconds, KILL_AFTER_SECONDS)
    return 0.0 if stops.urgent else KILL_AFTER_SECONDS


def _watch(
    process: subprocess.Popen[bytes],
    family: Family,
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
        family.look()
        if stops.count and deadline is None:
            if ask_to_stop is None:
                return 128 + signal.SIGTERM
            ask_to_stop()
            deadline = time.monotonic() + grace_seconds
        if deadline is not None and (stops.urgent or time.monotonic() > deadline):
            return 128 + signal.SIGKILL


class Family:
    """A process and all its descendants, remembered while it lives.

    The elastic agent puts workers into sessions of their own, so no signal to a group reaches them, and once the agent
    is dead nothing leads from it to them any more.
    """

    LOOK_SECONDS = 1.0

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._members = {self._root}
        self._next_look = 0.0

    def look(self) -> None:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + self.LOOK_SECONDS
            with contextlib.suppress(psutil.NoSuchProcess):
                self._members |= set(self._root.children(recursive=True))

    def end(self, grace_seconds: float) -> None:
        """Terminate whoever is left, give them time to save, then kill."""
        self._next_look = 0.0
        self.look()
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
    """In a child: ask the kernel for SIGTERM when the parent dies (Linux only)."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def was_struck_down(status: int) -> bool:
    """Whether a process ended by a signal that is no request to stop, such as SIGKILL."""
    return status < 0 and -status not in (signal.SIGINT, *NOTICES)


def explain_death(run_dir: Path, status: int, *, log_from: int = 0) -> str | None:
    """Which rank was killed by which signal, as the log (from byte `log_from` on) or the exit status tells."""
    told = re.findall(r"^Rank \d+ was killed by SIG.*$", log_tail(run_dir, lines=200, begin=log_from), re.MULTILINE)
    if told:
        return str(told[-1])
    if status >= 0:
        return None
    return was_killed("A worker process", signal.Signals(-status))


def was_killed(who: str, by: signal.Signals) -> str:
    hint = " (most often the kernel, out of memory)" if by is signal.SIGKILL else ""
    return f"{who} was killed by {by.name}{hint}."


def log_tail(run_dir: Path, *, lines: int, begin: int = 0) -> str:
    path = run_dir / LOG_FILE
    if not path.exists():
        return ""
    with open(path, "rb") as file:
        file.seek(max(begin, os.path.getsize(path) - 65536))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
