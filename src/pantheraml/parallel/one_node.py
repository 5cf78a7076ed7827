"""Where the ranks of one node meet: in a file of the user's own, or at a port of the loopback interface.

torch's own rendezvous for an elastic agent (c10d) listens on every interface, and the agent unpickles what it finds
there: whoever reaches the port runs code. The agent of one node has nobody to meet, so here it keeps its state in
memory. Our own ranks meet in a file in a folder that only the user can enter. A user's script joins by `env://`, which
knows TCP alone: for it the agent hosts a store that listens on loopback.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
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
from pantheraml.launch.script import Store

LOOPBACK = "127.0.0.1"
BACKEND = "pantheraml-one-node"


class OneNode(RendezvousHandler):
    """A rendezvous of one agent: its state stays in this process, and `port` of loopback is where the ranks meet."""

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
    return OneNode(parameters.run_id, parameters.get("port"))


@contextlib.contextmanager
def meeting_place(store: Store, folder: Path) -> Iterator[dict[str, Any]]:
    """What a LaunchConfig says about where its ranks meet, for as long as the `with` block lasts."""
    rendezvous_handler_registry.register(BACKEND, create_handler)
    if store == "file":
        with env.changed({env.STORE_FILE: str(folder / "store")}):
            yield _settings(port=0)  # nobody listens anywhere
        return
    hosted, port = listening_on_loopback()
    yield _settings(port=port)
    del hosted  # it ends when nobody refers to it any more


def _settings(*, port: int) -> dict[str, Any]:
    # not by its name, which a machine need not know itself
    return {"rdzv_backend": BACKEND, "rdzv_configs": {"port": port}, "local_addr": LOOPBACK}


def listening_on_loopback() -> tuple[C10dStore, int]:
    """A store that nobody on another host can reach, and its port."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        hosted = dist.TCPStore(  # type: ignore[attr-defined]  # as above
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
    return hosted, port


def interface_variables(name: str | None) -> dict[str, str]:
    """What keeps the sockets of gloo and NCCL on one network interface; None: they choose. Users may say otherwise."""
    if name is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # = : this one, not all that begin so
    return {variable: value for variable, value in wanted.items() if not env.is_set(variable)}


def loopback_interface() -> str | None:
    """Its name; None: this node has none."""
    found = psutil.net_if_addrs().items()
    return next((name for name, addresses in found if LOOPBACK in (one.address for one in addresses)), None)
