"""Shared by all tests: a test that leaves processes, threads, a process group or a changed environment behind fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

# Processes that Python and torch.compile keep for the life of the interpreter.
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor/compile_worker")

LEAVE_SECONDS = 60.0
"""For children and threads on their way out. Where there are none it costs nothing, and a busy machine is slow."""

# set by pytest itself and by torch when an optimizer is first imported
IGNORED = ("PYTEST_", "TORCHINDUCTOR_", "TRITON_")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--equality", choices=["chosen", "full"], default="chosen", help="how much of the equality matrix to go through"
    )


def pytest_configure() -> None:
    """A shell starts what runs in the background with Ctrl-C ignored, and so would be all that tests start: a shell
    that finds a signal ignored cannot trap it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Importing tests leaves no garbage to speak of, and to look for some takes a sixth of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported by now is never garbage: a collection that need not look at it takes 10 ms instead of 600."""
    gc.collect()
    gc.freeze()
    gc.enable()


def _children() -> set[int]:
    """Child processes that are alive; zombies nobody waited for count too, multiprocessing's own helpers do not."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if not any(helper in command for helper in HELPERS):
            found.add(child.pid)
    return found


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    environment, children, threads = dict(os.environ), _children(), _threads()
    yield
    deadline = time.monotonic() + LEAVE_SECONDS
    while (_children() - children or _threads() - threads) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _children() - children, "the test left processes behind"
    assert not _threads() - threads, "the test left threads behind"
    changed = {k: v for k, v in os.environ.items() if environment.get(k) != v and not k.startswith(IGNORED)}
    assert not changed, f"the test changed the environment: {changed}"
    torch = __import__("sys").modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        assert not torch.distributed.is_initialized(), "the test left a process group behind"
