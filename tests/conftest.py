"""Shared by all tests: fail a test that leaks processes, threads, a process group or environment variables."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests import promises

# Processes that Python and torch.compile keep alive until the interpreter exits.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor/compile_worker")

LEAVE_SECONDS = 60.0
"""Time for children and threads to exit; generous, for busy hosts. Costs nothing if there are none."""

# set by pytest itself, by torch when an optimizer is first imported or a module compiled, and by packages for OpenMP
IGNORED = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--equality", choices=["chosen", "full"], default="chosen", help="how much of the equality matrix to run"
    )
    promises.pytest_addoption(parser)


pytest_runtest_makereport = promises.pytest_runtest_makereport
pytest_make_collect_report = promises.pytest_make_collect_report


def pytest_configure() -> None:
    """Restore SIGINT: shells start background jobs with it ignored, subprocesses would inherit that, and a shell cannot
    trap a signal that it finds ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Disable the garbage collector during collection: it finds almost nothing and takes a sixth of the time."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze imported objects, which never become garbage: a collection then takes 10 ms instead of 600."""
    gc.collect()
    gc.freeze()
    gc.enable()
    promises.pytest_collection_finish(session)


def _children() -> set[int]:
    """Return the pids of child processes, including zombies, but not multiprocessing's own helpers."""
    pids = set()
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if not any(helper in command for helper in HELPERS):
            pids.add(child.pid)
    return pids


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    environment, children, threads = dict(os.environ), _children(), _threads()
    yield
    deadline = time.monotonic() + LEAVE_SECONDS
    while (_children() - children or _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() - children, "the test leaked processes"
    assert not _threads() - threads, "the test leaked threads"
    changed = {k: v for k, v in os.environ.items() if environment.get(k) != v and not k.startswith(IGNORED)}
    assert not changed, f"the test changed the environment: {changed}"
    torch = __import__("sys").modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        assert not torch.distributed.is_initialized(), "the test leaked a process group"
