"""Ranks meet: all of them reach one key-value store in time, or every one that came says who did not.

This happens before the first collective, on the store alone, so that a peer that never comes is an error with a name
and not a hang. Reaching the store is tried again, as that changes nothing; what follows never is.
"""

from __future__ import annotations

import datetime
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pantheraml.base import log
from pantheraml.base.env import ProcessRank, StoreAddress
from pantheraml.base.errors import LaunchError

logger = log.get(__name__)

FIRST_PAUSE_SECONDS = 0.25
ROLL_CALL_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

Value = TypeVar("Value")


@dataclass(frozen=True)
class Who:
    """Those who meet, in words; and their own part of a store that they may share with others."""

    one: str
    many: str
    part: str
    host: str
    """Where they were told the host of the store, and below its port."""
    port: str

    @property
    def address(self) -> str:
        return self.host if self.host == self.port else f"{self.host} and {self.port}"


PROCESSES = Who("rank", "processes", "", "MASTER_ADDR", "MASTER_PORT")
MACHINES = Who("machine", "machines", "machines/", "--rdzv", "--rdzv")


class Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def meet(
    place: ProcessRank,
    address: StoreAddress,
    *,
    timeout_seconds: float,
    max_retries: int = 3,
    who: Who = PROCESSES,
) -> Store:
    """The store that all ranks of `place.world_size` share; each time they meet they get a fresh part of it.

    A LaunchError within about `timeout_seconds` names the ranks that did not come, or says why the store cannot be
    reached. `max_retries` is how often a failure that may pass (a port still taken, a name not known yet) is tried
    again; a store that is not up yet is waited for.
    """
    deadline = Deadline(timeout_seconds)
    hosts_store = place.rank == 0 and not address.hosted_by_agent
    if hosts_store:
        store = _with_retries(lambda: _host(place, address, deadline, who), max_retries, deadline)
    else:
        store = _with_retries(lambda: _reach(place, address, deadline, who), max_retries, deadline)
    try:
        return _roll_call(store, place, address, deadline, who)
    except dist.DistNetworkError as err:
        raise LaunchError(
            f"{who.one.capitalize()} {place.rank} lost the store at {address.host}:{address.port} while it waited for"
            " the others.",
            todo=f"The process that hosts it ({who.one} 0, or its torchrun) ended; its own error says why.",
        ) from err


def interface_towards(address: StoreAddress) -> str | None:
    """The network interface by which this machine reaches a store on another, or another reaches its own.

    Left to itself, gloo takes the one that the machine's own name leads to, which is often the loopback, and where
    other machines then look for this one in vain. None: all is on this machine, or it cannot be told.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout=LONGEST_PAUSE_SECONDS) as connection:
            own = connection.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if own in (a.address.partition("%")[0] for a in addresses)), None)


def _host(place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Who) -> Store:
    _resolve(address, who)
    return _on_time(lambda: _open(place, address, deadline, is_master=True), address, deadline, who)


def _reach(place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Who) -> Store:
    """A plain connection first: the store's own client waits past its timeout and fills the log."""
    _resolve(address, who)
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            socket.create_connection((address.host, address.port), timeout=max(0.1, deadline.left)).close()
            break
        except OSError as err:
            if not deadline.left:
                raise LaunchError(
                    f"{who.one.capitalize()} {place.rank} of {place.world_size} could not reach the store at"
                    f" {address.host}:{address.port} within {deadline.seconds:g} s: {err.strerror or err}.",
                    todo=f"Check that {who.one} 0 was started, that {who.address} leads to it, and firewalls.",
                ) from err
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return _on_time(lambda: _open(place, address, deadline, is_master=False), address, deadline, who)


def _open(place: ProcessRank, address: StoreAddress, deadline: Deadline, *, is_master: bool) -> Store:
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch does not say so to type checkers
        address.host,
        address.port,
        place.world_size,
        is_master,
        datetime.timedelta(seconds=max(1.0, deadline.left)),
        wait_for_workers=False,  # it would count them but not name them
        multi_tenant=True,  # a process that meets its peers twice hosts one store
    )


class _MayPass(Exception):
    """A failure that may be gone a moment later."""

    def __init__(self, error: LaunchError) -> None:
        super().__init__(str(error))
        self.error = error


def _resolve(address: StoreAddress, who: Who) -> None:
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as err:
        raise _MayPass(
            LaunchError(
                f"{address.host}, from {who.host}, is not the name of a machine: {err.strerror}.",
                todo=f"Set {who.host} to the machine of {who.one} 0.",
            )
        ) from err


def _with_retries(attempt: Callable[[], Value], max_retries: int, deadline: Deadline) -> Value:
    pause = FIRST_PAUSE_SECONDS
    for tried in range(max_retries + 1):
        try:
            return attempt()
        except _MayPass as err:
            if tried == max_retries or deadline.left < pause:
                raise err.error from err
            logger.warning("%s Trying again in %g s.", err.error.what, pause)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    raise AssertionError("unreachable")


def _on_time(open_store: Callable[[], Store], address: StoreAddress, deadline: Deadline, who: Who) -> Store:
    """Opened in a thread: the client waits forever for the greeting of a server that takes it for someone else."""
    answers: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(open_store())
        except RuntimeError as err:  # dist.DistError is one
            answers.put(err)

    threading.Thread(target=run, name="open-store", daemon=True).start()
    try:
        answer = answers.get(timeout=max(1.0, deadline.left))
    except queue.Empty:
        answer = RuntimeError("no answer")
    if not isinstance(answer, RuntimeError):
        return answer
    place = f"{address.host}:{address.port}"
    if "EADDRINUSE" in str(answer):
        raise _MayPass(
            LaunchError(
                f"{who.one.capitalize()} 0 cannot host the store: port {address.port} is taken by another process.",
                todo=f"Set {who.port} to a free port on all {who.many}.",
            )
        ) from answer
    raise LaunchError(
        f"Something listens at {place}, but it is not the store of this run ({str(answer).splitlines()[0]}).",
        todo=f"Check {who.address}: the machine of {who.one} 0, and a port that only it uses.",
    ) from answer


def _roll_call(store: Store, place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Who) -> Store:
    # How often this rank has come: the same number on all ranks, as they meet in the same order.
    number = store.add(f"pantheraml/{who.part}{address.attempt}/visits/{place.rank}", 1)
    shared = PrefixStore(f"pantheraml/{who.part}{address.attempt}/{number}", store)
    shared.set(f"here/{place.rank}", socket.gethostname())
    names = [f"here/{rank}" for rank in range(place.world_size)]
    # Not `wait`: after one that ran out, TCPStore's next answers may belong to earlier questions.
    while not shared.check(names):
        if deadline.left <= 0:
            missing = [rank for rank, name in enumerate(names) if not shared.check([name])]
            came = f"{place.world_size - len(missing)} of {place.world_size} {who.many}"
            names_of = f"{who.one}{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise LaunchError(
                f"{came} came within {deadline.seconds:g} s; missing: {names_of}.",
                todo="Check that all started (their logs), and raise parallel.timeout_seconds if they are slow.",
            )
        time.sleep(ROLL_CALL_SECONDS)
    return shared
