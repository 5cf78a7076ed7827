"""A port of this machine for those who are told of it, and for nobody else."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """Free, and it stays so until somebody listens there who knows its number.

    It is held by a socket that is bound but does not listen. The kernel then gives the port to nobody who asks for any,
    as a port is that was free a moment ago; who asks for this very one may have it, as a store does (SO_REUSEADDR).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
