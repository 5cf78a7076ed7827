"""Ranks meet: all of them reach one key-value store in time, or every one that came says who did not.

This happens before the first collective, on the store alone, so that a peer that never comes is an error with a name
and not a hang. Reaching the store is tried again, as that changes nothing; what follows never is.
"""

from __future__ import annotations

import datetime
import errno
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
from torch.distributed.distributed_c10d import Store

from pantheraml.base import env, log
from pantheraml.base.env import ProcessRank, StoreAddress
from pantheraml.base.errors import LaunchError
from pantheraml.parallel.one_node import loopback_interface
from pantheraml.parallel.sealed import SealedStore

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
    token: str | None = None,
) -> SealedStore:
    """The store that all ranks of `place.world_size` share; each time they meet they get a fresh part of it.

    Who has another run token (`token`, else the environment's) is told so, and nothing that it says is used.

    A LaunchError within about `timeout_seconds` names the ranks that did not come, or says why the store cannot be
    reached. `max_retries` is how often a failure that may pass (a port still taken, a name not known yet) is tried
    again; a store that is not up yet is waited for.
    """
    deadline = Deadline(timeout_seconds)
    store: Store
    if address.file is not None:
        store = dist.FileStore(str(address.file))  # type: ignore[attr-defined]  # public, but not to type checkers
        store.set_timeout(datetime.timedelta(seconds=max(1.0, timeout_seconds)))
    elif place.rank == 0 and not address.hosted_by_agent:
        store = _with_retries(lambda: _host(place, address, deadline, who), max_retries, deadline)
    else:
        store = _with_retries(lambda: _reach(place, address, deadline, who), max_retries, deadline)
    try:
        return _roll_call(store, place, address, deadline, who, token or env.run_token())
    except dist.DistNetworkError as err:
        raise LaunchError(
            f"{who.one.capitalize()} {place.rank} lost the store at {address} while it waited for the others.",
            todo=f"The process that hosts it ({who.one} 0, or its torchrun) ended; its own error says why.",
        ) from err


def interface_towards(address: StoreAddress) -> str | None:
    """The network interface by which this node reaches a store on another, or another reaches its own; loopback if the
    store is there, since all ranks then are on one node.

    Left to itself, gloo takes the one that the node's own name leads to: often loopback, where other nodes look for
    this one in vain, or one that strangers reach. None: it cannot be told.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout=LONGEST_PAUSE_SECONDS) as connection:
            own = connection.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(own).is_loopback:
        return loopback_interface()
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if own in (a.address.partition("%")[0] for a in addresses)), None)


def _host(place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Who) -> Store:
    _resolve(address, who)
    several_nodes = who is MACHINES or place.local_world_size not in (None, place.world_size)
    with _listening(address, who, several_nodes=several_nodes) as server:
        own = server.getsockname()
        # A process that meets its peers twice hosts one store, which then takes no other socket.
        at = StoreAddress(address.host, address.port or own[1], hosted_by_agent=False, attempt=address.attempt)
        try:
            store = _on_time(lambda: _open(place, at, deadline, listens=server.fileno()), at, deadline, who)
        except LaunchError as err:
            if own[1] != at.port:  # what listens in this process is no store
                raise _MayPass(_taken(address, who)) from err
            raise
        if own[1] == at.port:
            server.detach()  # it is the store's from now on
        return store


def _listening(address: StoreAddress, who: Who, *, several_nodes: bool) -> socket.socket:
    """Listens at this very address: by itself the store would listen on every interface.

    Where the process hosts a store at that port already, a socket at another port of loopback, which torch refuses to
    use in place of the one that it has.
    """
    family, _, _, _, own = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    if several_nodes and _is_name(address.host) and ipaddress.ip_address(own[0]).is_loopback:
        raise LaunchError(
            f"{address.host}, from {who.host}, leads to {own[0]} on its own node, where no other node can reach it.",
            todo=f"Set {who.host} to an address of that node's network interface.",
        )
    try:
        return socket.create_server(own[:2], family=family)
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            if _listens_already(address.port):
                return socket.create_server(("127.0.0.1", 0))
            raise _MayPass(_taken(address, who)) from err
        raise LaunchError(
            f"{who.one.capitalize()} 0 cannot host the store at {address.host}: {err.strerror or err}.",
            todo=f"Set {who.host} to an address of a network interface of the machine of {who.one} 0.",
        ) from err


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _listens_already(port: int) -> bool:
    own = psutil.Process().net_connections("tcp")
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in own)


def _taken(address: StoreAddress, who: Who) -> LaunchError:
    return LaunchError(
        f"{who.one.capitalize()} 0 cannot host the store: port {address.port} is taken by another process.",
        todo=f"Set {who.port} to a free port on all {who.many}.",
    )


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
    return _on_time(lambda: _open(place, address, deadline), address, deadline, who)


def _open(place: ProcessRank, address: StoreAddress, deadline: Deadline, *, listens: int | None = None) -> Store:
    """A store that `listens`, or one that somebody else hosts."""
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch does not say so to type checkers
        address.host,
        address.port,
        place.world_size,
        listens is not None,
        datetime.timedelta(seconds=max(1.0, deadline.left)),
        wait_for_workers=False,  # it would count them but not name them
        multi_tenant=True,  # a process that meets its peers twice hosts one store
        master_listen_fd=listens,
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
    raise LaunchError(
        f"Something listens at {place}, but it is not the store of this run ({str(answer).splitlines()[0]}).",
        todo=f"Check {who.address}: the machine of {who.one} 0, and a port that only it uses.",
    ) from answer


def _roll_call(
    store: Store, place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Who, token: str | None
) -> SealedStore:
    # How often this rank has come: the same number on all ranks, as they meet in the same order.
    number = store.add(f"pantheraml/{who.part}{address.attempt}/visits/{place.rank}", 1)
    shared = SealedStore(store, f"pantheraml/{who.part}{address.attempt}/{number}", token)
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
    for rank, name in enumerate(names):
        if shared.get_if_ours(name) is None:
            raise LaunchError(
                f"{who.one.capitalize()} {rank} at {address} has another run token than {who.one} {place.rank}.",
                todo="Give all of them the same --output, on a file system that all nodes share, or set"
                " PANTHERAML_RUN_TOKEN to the same value. If nobody of yours came, a stranger reaches that port.",
            )
    return shared
