"""Rendezvous: all ranks (or nodes) join one key-value store in time, or each that joined names those that did not.

This runs before the first collective, on the store alone, so that a missing rank is an error with a name and not a
hang. Connecting to the store is retried, since it has no side effects; nothing after it is.
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
from pantheraml.rendezvous.one_node import loopback_interface
from pantheraml.rendezvous.sealed_store import SealedStore

logger = log.get(__name__)

FIRST_PAUSE_SECONDS = 0.25
ROLL_CALL_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0

Value = TypeVar("Value")


@dataclass(frozen=True)
class Participants:
    """Ranks or nodes that join a store: their names in messages, key prefix, and the settings that gave the address."""

    one: str
    many: str
    prefix: str
    host: str
    """Setting that names the store's host."""
    port: str
    """Setting that names its port."""

    @property
    def address(self) -> str:
        return self.host if self.host == self.port else f"{self.host} and {self.port}"

    @property
    def host_node(self) -> str:
        return "node 0" if self.one == "node" else f"the node of {self.one} 0"


RANKS = Participants("rank", "ranks", "", "MASTER_ADDR", "MASTER_PORT")
NODES = Participants("node", "nodes", "nodes/", "--rdzv", "--rdzv")


class Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def join_store(
    place: ProcessRank,
    address: StoreAddress,
    *,
    timeout_seconds: float,
    max_retries: int = 3,
    who: Participants = RANKS,
    token: str | None = None,
) -> SealedStore:
    """Join the store shared by `place.world_size` ranks; every call gets a fresh key prefix.

    A participant with a different run token (`token`, default from the environment) is rejected, and none of its values
    are used.

    Raises LaunchError within about `timeout_seconds`, naming the ranks that did not join or why the store is
    unreachable. Transient failures (port still in use, host name not yet known) are retried `max_retries` times; a
    store that is not up yet is waited for.
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
            fix=f"Check the log of the process that hosts it ({who.one} 0, or its torchrun): it exited.",
        ) from err


def interface_towards(address: StoreAddress) -> str | None:
    """Return the network interface on the route to the store, or None if it is unreachable; loopback on a single node.

    By default gloo uses the interface that the node's own host name resolves to: often loopback, which other nodes
    cannot reach, or a public one.
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


def _host(place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Participants) -> Store:
    _resolve(address, who)
    several_nodes = who is NODES or place.local_world_size not in (None, place.world_size)
    with _listening(address, who, several_nodes=several_nodes) as server:
        own = server.getsockname()
        # A process that joins twice hosts one store (multi_tenant), which takes no second socket.
        at = StoreAddress(address.host, address.port or own[1], hosted_by_agent=False, attempt=address.attempt)
        try:
            store = _on_time(lambda: _open(place, at, deadline, listens=server.fileno()), at, deadline, who)
        except LaunchError as err:
            if own[1] != at.port:  # this process listens on the port, but not with a store
                raise _TransientError(_taken(address, who)) from err
            raise
        if own[1] == at.port:
            server.detach()  # the store owns it now
        return store


def _listening(address: StoreAddress, who: Participants, *, several_nodes: bool) -> socket.socket:
    """Return a socket listening on exactly this address; TCPStore by itself listens on every interface.

    If this process already hosts a store on that port, return a dummy loopback socket; torch keeps using the first.
    """
    family, _, _, _, own = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    if several_nodes and _is_name(address.host) and ipaddress.ip_address(own[0]).is_loopback:
        raise LaunchError(
            f"{address.host}, from {who.host}, resolves to {own[0]} on its own node, which other nodes cannot reach.",
            fix=f"Set {who.host} to an address of that node's network interface.",
        )
    try:
        return socket.create_server(own[:2], family=family)
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            if _listens_already(address.port):
                return socket.create_server(("127.0.0.1", 0))
            raise _TransientError(_taken(address, who)) from err
        raise LaunchError(
            f"{who.one.capitalize()} 0 cannot host the store at {address.host}: {err.strerror or err}.",
            fix=f"Set {who.host} to an address of a network interface of {who.host_node}.",
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


def _taken(address: StoreAddress, who: Participants) -> LaunchError:
    return LaunchError(
        f"{who.one.capitalize()} 0 cannot host the store: port {address.port} is in use by another process.",
        fix=f"Set {who.port} to a free port on all {who.many}.",
    )


def _reach(place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Participants) -> Store:
    """Connect to the store after a plain socket probe: TCPStore's client overruns its timeout and spams logs."""
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
                    fix=f"Check that {who.one} 0 was started, that {who.address} points to it, and firewalls.",
                ) from err
        time.sleep(min(pause, deadline.left))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    return _on_time(lambda: _open(place, address, deadline), address, deadline, who)


def _open(place: ProcessRank, address: StoreAddress, deadline: Deadline, *, listens: int | None = None) -> Store:
    """Host the store on the socket `listens`, or connect as a client if it is None."""
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch does not say so to type checkers
        address.host,
        address.port,
        place.world_size,
        listens is not None,
        datetime.timedelta(seconds=max(1.0, deadline.left)),
        wait_for_workers=False,  # it counts workers but cannot name the missing ones
        multi_tenant=True,  # a process that joins twice hosts one store
        master_listen_fd=listens,
    )


class _TransientError(Exception):
    """A failure worth a retry."""

    def __init__(self, error: LaunchError) -> None:
        super().__init__(str(error))
        self.error = error


def _resolve(address: StoreAddress, who: Participants) -> None:
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as err:
        raise _TransientError(
            LaunchError(
                f"{address.host}, from {who.host}, does not resolve: {err.strerror}.",
                fix=f"Set {who.host} to the host name or address of {who.host_node}.",
            )
        ) from err


def _with_retries(attempt: Callable[[], Value], max_retries: int, deadline: Deadline) -> Value:
    pause = FIRST_PAUSE_SECONDS
    for tried in range(max_retries + 1):
        try:
            return attempt()
        except _TransientError as err:
            if tried == max_retries or deadline.left < pause:
                raise err.error from err
            logger.warning("%s Retrying in %g s.", err.error.what, pause)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    raise AssertionError("unreachable")


def _on_time(open_store: Callable[[], Store], address: StoreAddress, deadline: Deadline, who: Participants) -> Store:
    """Open the store in a thread: the client waits forever for the handshake if the server is not a TCPStore."""
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
        answer = RuntimeError("no response")
    if not isinstance(answer, RuntimeError):
        return answer
    place = f"{address.host}:{address.port}"
    raise LaunchError(
        f"Something listens at {place}, but it is not the store of this run ({str(answer).splitlines()[0]}).",
        fix=f"Set {who.address} to {who.host_node} and a port that nothing else uses.",
    ) from answer


def _roll_call(
    store: Store, place: ProcessRank, address: StoreAddress, deadline: Deadline, who: Participants, token: str | None
) -> SealedStore:
    # How often this rank has joined: the same number on all ranks, since they join in the same order.
    number = store.add(f"pantheraml/{who.prefix}{address.attempt}/visits/{place.rank}", 1)
    shared = SealedStore(store, f"pantheraml/{who.prefix}{address.attempt}/{number}", token)
    shared.set(f"here/{place.rank}", socket.gethostname())
    names = [f"here/{rank}" for rank in range(place.world_size)]
    # Poll instead of `wait`: after a wait that timed out, TCPStore's next replies may belong to earlier requests.
    while not shared.check(names):
        if deadline.left <= 0:
            missing = [rank for rank, name in enumerate(names) if not shared.check([name])]
            joined = f"{place.world_size - len(missing)} of {place.world_size} {who.many}"
            absent = f"{who.one}{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            raise LaunchError(
                f"{joined} joined within {deadline.seconds:g} s; missing: {absent}.",
                fix="Check in their logs that all started, and raise parallel.timeout_seconds if they are slow.",
            )
        time.sleep(ROLL_CALL_SECONDS)
    for rank, name in enumerate(names):
        if shared.get_verified(name) is None:
            raise LaunchError(
                f"{who.one.capitalize()} {rank} at {address} has a different run token than {who.one} {place.rank}.",
                fix="Give all nodes the same --output on a shared file system, or set PANTHERAML_RUN_TOKEN to the same"
                f" value. If you did not start that {who.one}, someone else can reach the port.",
            )
    return shared
