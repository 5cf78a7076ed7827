"""Single-node rendezvous of scripts and functions: a TCPStore on loopback.

torch's c10d rendezvous for elastic agents listens on every interface, and the agent unpickles what it reads there, so
anyone who reaches the port can run code. A single agent has no peers, so here its state stays in memory. A user's
script joins through `env://`, which supports TCP only: for it the agent hosts a TCPStore bound to loopback. Ranks of
our own commands use a file instead (`launch.local_ranks`).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as C10dStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from pantheraml.base import env

LOOPBACK = "127.0.0.1"
BACKEND = "pantheraml-one-node"


class SingleNodeRendezvous(RendezvousHandler):
    """Rendezvous handler of one agent, with in-memory state; the ranks use a TCPStore on loopback `port`."""

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id, self._port = run_id, port
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        memory = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch does not say so to type checkers
        return RendezvousInfo(memory, 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    return SingleNodeRendezvous(parameters.run_id, parameters.get("port"))


@contextlib.contextmanager
def rendezvous_settings() -> Iterator[dict[str, Any]]:
    """Yield the rendezvous arguments of a LaunchConfig, valid inside the `with` block."""
    rendezvous_handler_registry.register(BACKEND, create_handler)
    hosted, port = listening_on_loopback()
    # an address, since a node may not resolve its own host name
    yield {"rdzv_backend": BACKEND, "rdzv_configs": {"port": port}, "local_addr": LOOPBACK}
    del hosted  # the last reference: closes the store


def listening_on_loopback() -> tuple[C10dStore, int]:
    """Host a TCPStore on loopback, unreachable from other hosts; return it and its port."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        hosted = dist.TCPStore(  # type: ignore[attr-defined]  # as above
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    return hosted, port


def interface_variables(name: str | None) -> dict[str, str]:
    """Return variables that bind gloo and NCCL to one network interface, except those that the user has set."""
    if name is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # "=": exact match, not a prefix
    return {variable: value for variable, value in variables.items() if not env.is_set(variable)}


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, or None."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if LOOPBACK in (one.address for one in addresses)), None)
