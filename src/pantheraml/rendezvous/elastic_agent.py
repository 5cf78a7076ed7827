"""Run a script or a function as the ranks of this node, under torch's elastic agent.

The agent sets each rank's environment, ends the others when one dies, and forwards Ctrl-C once. Instead of torchrun's
traceback, the caller gets the failing rank, its exit code or signal, and its error. Only these ranks can reach their
store (`one_node`), or write into it what the others believe (the run token).
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pantheraml.base import env
from pantheraml.launch.local import PREEMPTION_SIGNALS, die_with_parent, killed_message
from pantheraml.rendezvous import one_node

HANDLED_SIGNALS = (*PREEMPTION_SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_HANDLED_NAMES = ",".join(number.name for number in HANDLED_SIGNALS)


@dataclass(frozen=True)
class RankFailure:
    """The first rank to fail."""

    rank: int
    exit_code: int
    """Shell convention: 128 + number for a signal."""
    killed_by: signal.Signals | None
    error: str | None
    """Exception text, if the rank ran a function."""
    traceback: str | None

    def __str__(self) -> str:
        if self.killed_by is not None:
            return killed_message(f"Rank {self.rank}", self.killed_by)
        if self.error is not None:
            return f"Rank {self.rank} failed: {self.error}."
        return f"Rank {self.rank} ended with status {self.exit_code}."


@dataclass(frozen=True)
class LaunchResult:
    """Return values by rank, or the first failure, or the signal that stopped the launch."""

    values: dict[int, Any]
    failure: RankFailure | None = None
    stopped_by: signal.Signals | None = None


def run_command(command: list[str], *, processes: int) -> LaunchResult:
    """Run `processes` ranks of a command, each in its own session."""
    return _run(command[0], command[1:], processes, "spawn")


def run_function(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, processes: int, start: Literal["spawn", "fork"]
) -> LaunchResult:
    """Run `processes` ranks of `function(*arguments)` and collect return values by rank."""
    return _run(_DiesWithParent(function), list(arguments), processes, start)


class _DiesWithParent:
    """A function whose process ends with the process that launched it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")

    def __call__(self, *arguments: Any) -> Any:
        die_with_parent()
        # A forked process inherits the agent's handlers, which cannot interrupt a rank blocked inside torch.
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._function(*arguments)


def _run(entrypoint: Any, arguments: list[Any], processes: int, start: str) -> LaunchResult:
    with (
        tempfile.TemporaryDirectory(prefix="pantheraml-ranks-") as folder,  # 0700: not readable by other users
        _signals_restored(),
        env.changed({"TORCHELASTIC_SIGNALS_TO_HANDLE": _HANDLED_NAMES}),
        env.changed(one_node.interface_variables(one_node.loopback_interface())),
        env.changed({"PANTHERAML_RUN_TOKEN": env.run_token() or secrets.token_hex(32)}),
        one_node.rendezvous_settings() as where,
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
            return LaunchResult(elastic_launch(config, entrypoint)(*arguments))
        except ChildFailedError as err:
            return LaunchResult({}, failure=_first(err.failures))
        except SignalException as err:
            return LaunchResult({}, stopped_by=err.sigval)


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore signal handlers that the agent replaces; in a notebook the process outlives it."""
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first(failures: dict[int, ProcessFailure]) -> RankFailure:
    """Return the root cause: a rank killed by a signal comes before peers that lost their connection to it.

    The agent itself sends SIGTERM to the remaining ranks, and SIGKILL much later.
    """
    begin = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int, int]:
        rank, failure = item
        if failure.exitcode == -signal.SIGTERM:
            priority = 2
        else:
            priority = 0 if failure.exitcode < 0 and failure.timestamp <= begin + 1 else 1
        return (priority, failure.timestamp, rank)

    rank, failure = min(failures.items(), key=order)
    killed_by = signal.Signals(-failure.exitcode) if failure.exitcode < 0 else None
    recorded: Any = failure.message  # a mapping if a function raised, otherwise text about the exit code
    raised = recorded if isinstance(recorded, dict) else {}
    return RankFailure(
        rank=rank,
        exit_code=128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode,
        killed_by=killed_by,
        error=raised.get("message"),
        traceback=raised.get("extraInfo", {}).get("py_callstack"),
    )
