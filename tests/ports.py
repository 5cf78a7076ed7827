"""Reserve a local port for a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port that stays reserved until someone listens on it explicitly.

    It is held by a socket that is bound but does not listen. The kernel then never hands it out as an ephemeral port,
    as it may with a port that was merely free a moment ago; a server that asks for this port with SO_REUSEADDR, as a
    TCPStore does, still gets it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
