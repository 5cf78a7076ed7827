"""Ranks on this machine, of which there may be others, under torch's elastic agent: started, watched, ended together.

The agent tells each rank its number and where to meet, ends the others when one dies, and passes Ctrl-C on once. What
torchrun prints about a failure is a traceback of its own; here the caller gets the rank, its exit code or signal, and
what it said.
"""

from __future__ import annotations

import contextlib
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
from pantheraml.launch.local import die_with_parent
from pantheraml.parallel.rendezvous import MACHINES, meet

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class RankFailure:
    """The rank whose end ended the others."""

    rank: int
    exit_code: int
    """As a shell sees it: 128 + number for a signal."""
    signal: str | None
    error: str | None
    """What it raised, if it was a function."""
    traceback: str | None

    def __str__(self) -> str:
        if self.signal is not None:
            hint = " (most often the kernel, out of memory)" if self.signal == "SIGKILL" else ""
            return f"Rank {self.rank} was killed by {self.signal}{hint}."
        if self.error is not None:
            return f"Rank {self.rank} failed: {self.error}."
        return f"Rank {self.rank} ended with status {self.exit_code}."


@dataclass(frozen=True)
class Ended:
    """How it came out: each rank's return value, or the first failure, or the signal that stopped it."""

    values: dict[int, Any]
    failure: RankFailure | None = None
    stopped_by: signal.Signals | None = None


@dataclass(frozen=True)
class Machines:
    """This machine among `count` that share a run; the agent of number 0 hosts the store, at `host`:`port`."""

    count: int
    number: int
    host: str
    port: int
    timeout_seconds: int
    max_retries: int


def run_command(command: list[str], *, processes: int, machines: Machines | None = None) -> Ended:
    """`processes` ranks of a command, each in a session of its own; with `machines`, beside those of the others.

    A machine that does not come is a LaunchError that names it.
    """
    if machines is None:
        return _run(command[0], command[1:], processes, "spawn", _ONE_MACHINE)
    place = env.ProcessRank(machines.number, 0, machines.count)
    address = env.StoreAddress(machines.host, machines.port, hosted_by_agent=False, attempt=0)
    # Held until the end: the agents, and later their ranks, share this store.
    store = meet(
        place, address, timeout_seconds=machines.timeout_seconds, max_retries=machines.max_retries, who=MACHINES
    )
    try:
        return _run(command[0], command[1:], processes, "spawn", _rendezvous_of(machines))
    finally:
        del store


_ONE_MACHINE = {
    "min_nodes": 1,
    "max_nodes": 1,
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
    "local_addr": "localhost",  # a machine's own name need not be known to itself
}


def _rendezvous_of(machines: Machines) -> dict[str, Any]:
    host = f"[{machines.host}]" if ":" in machines.host else machines.host
    return {
        "min_nodes": machines.count,
        "max_nodes": machines.count,
        "rdzv_backend": "static",
        "rdzv_endpoint": f"{host}:{machines.port}",
        "rdzv_configs": {"rank": machines.number, "timeout": machines.timeout_seconds},
    }


def run_function(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, processes: int, start: Literal["spawn", "fork"]
) -> Ended:
    """`processes` ranks of `function(*arguments)`; its return values come back by rank."""
    return _run(_Tied(function), list(arguments), processes, start, _ONE_MACHINE)


class _Tied:
    """A function that ends with the process that launched it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", "function")

    def __call__(self, *arguments: Any) -> Any:
        die_with_parent()
        # A forked process has the agent's handlers, which cannot interrupt a rank that waits inside torch.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self._function(*arguments)


def _run(entrypoint: Any, arguments: list[Any], processes: int, start: str, rendezvous: dict[str, Any]) -> Ended:
    with tempfile.TemporaryDirectory(prefix="pantheraml-ranks-") as logs, _signals_and_environment_restored():
        config = LaunchConfig(
            **rendezvous,
            nproc_per_node=processes,
            run_id="pantheraml" if rendezvous["max_nodes"] > 1 else uuid.uuid4().hex,
            max_restarts=0,
            start_method=start,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            return Ended(elastic_launch(config, entrypoint)(*arguments))
        except ChildFailedError as err:
            return Ended({}, failure=_first(err.failures))
        except SignalException as err:
            return Ended({}, stopped_by=err.sigval)


@contextlib.contextmanager
def _signals_and_environment_restored() -> Iterator[None]:
    """The agent takes signals over and writes one variable; in a notebook the process lives on after it."""
    before = {number: signal.getsignal(number) for number in HANDLED_SIGNALS}
    names = ",".join(number.name for number in HANDLED_SIGNALS)
    try:
        with env.changed("TORCHELASTIC_SIGNALS_TO_HANDLE", names):
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
    killed_by = signal.Signals(-failure.exitcode).name if failure.exitcode < 0 else None
    recorded: Any = failure.message  # what a function raised is a mapping, anything else a text about the exit code
    raised = recorded if isinstance(recorded, dict) else {}
    return RankFailure(
        rank=rank,
        exit_code=128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode,
        signal=killed_by,
        error=raised.get("message"),
        traceback=raised.get("extraInfo", {}).get("py_callstack"),
    )
