"""Ranks on this machine, under torch's elastic agent: started, watched, ended together.

The agent tells each rank its number and where to meet, ends the others when one dies, and passes Ctrl-C on once. What
torchrun prints about a failure is a traceback of its own; here the caller gets the rank, its exit code or signal, and
what it said. Nobody but these ranks can reach where they meet (`one_node`).
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pantheraml.base import env
from pantheraml.launch.local import NOTICES, die_with_parent, was_killed
from pantheraml.launch.script import Store
from pantheraml.parallel import one_node

HANDLED_SIGNALS = (*NOTICES, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_HANDLED_NAMES = ",".join(number.name for number in HANDLED_SIGNALS)


@dataclass(frozen=True)
class RankFailure:
    """The rank whose end ended the others."""

    rank: int
    exit_code: int
    """As a shell sees it: 128 + number for a signal."""
    killed_by: signal.Signals | None
    error: str | None
    """What it raised, if it was a function."""
    traceback: str | None

    def __str__(self) -> str:
        if self.killed_by is not None:
            return was_killed(f"Rank {self.rank}", self.killed_by)
        if self.error is not None:
            return f"Rank {self.rank} failed: {self.error}."
        return f"Rank {self.rank} ended with status {self.exit_code}."


@dataclass(frozen=True)
class Ended:
    """How it came out: each rank's return value, or the first failure, or the signal that stopped it."""

    values: dict[int, Any]
    failure: RankFailure | None = None
    stopped_by: signal.Signals | None = None


def run_command(command: list[str], *, processes: int, store: Store) -> Ended:
    """`processes` ranks of a command, each in a session of its own."""
    return _run(command[0], command[1:], processes, "spawn", store)


def run_function(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, processes: int, start: Literal["spawn", "fork"]
) -> Ended:
    """`processes` ranks of `function(*arguments)`; its return values come back by rank."""
    return _run(_Tied(function), list(arguments), processes, start, "loopback")


class _Tied:
    """A function that ends with the process that launched it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")

    def __call__(self, *arguments: Any) -> Any:
        die_with_parent()
        # A forked process has the agent's handlers, which cannot interrupt a rank that waits inside torch.
        for number in NOTICES:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._function(*arguments)


def _run(entrypoint: Any, arguments: list[Any], processes: int, start: str, store: Store) -> Ended:
    with (
        tempfile.TemporaryDirectory(prefix="pantheraml-ranks-") as folder,  # 0700: other users cannot look into it
        _signals_restored(),
        env.changed({"TORCHELASTIC_SIGNALS_TO_HANDLE": _HANDLED_NAMES}),
        env.changed(one_node.interface_variables(one_node.loopback_interface())),
        one_node.meeting_place(store, Path(folder)) as where,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            max_restarts=0,
            start_method=start,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle=_HANDLED_NAMES,
            **where,
        )
        try:
            return Ended(elastic_launch(config, entrypoint)(*arguments))
        except ChildFailedError as err:
            return Ended({}, failure=_first(err.failures))
        except SignalException as err:
            return Ended({}, stopped_by=err.sigval)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """The agent takes signals over; in a notebook the process lives on after it."""
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first(failures: dict[int, ProcessFailure]) -> RankFailure:
    """The cause: a rank that was killed outright, before peers that lost their connection to it in the same moment.

    SIGTERM is what the agent itself sends to those that are left, and SIGKILL much later.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        if failure.exitcode == -signal.SIGTERM:
            likely = 2
        else:
            likely = 0 if failure.exitcode < 0 and failure.timestamp <= begin + 1 else 1
        return (likely, failure.timestamp, rank)

    rank, failure = min(failures.items(), key=order)
    killed_by = signal.Signals(-failure.exitcode) if failure.exitcode < 0 else None
    recorded: Any = failure.message  # what a function raised is a mapping, anything else a text about the exit code
    raised = recorded if isinstance(recorded, dict) else {}
    return RankFailure(
        rank=rank,
        exit_code=128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode,
        killed_by=killed_by,
        error=raised.get("message"),
        traceback=raised.get("extraInfo", {}).get("py_callstack"),
    )
