"""Run the application under uvicorn, on a socket that is bound before anything is printed."""

from __future__ import annotations

import asyncio
import gc
import socket
import sys

import uvicorn

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError
from pantheraml.service.app import create_app, preparation
from pantheraml.service.context import ServiceContext
from pantheraml.service.settings import Settings

SHUTDOWN_SECONDS = 5


def serve(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; running jobs continue without the service."""
    return asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    async with preparation(settings) as context:
        listener = bind(settings)
        app = create_app(settings, context)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        host, port = listener.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"Serving on http://{address}:{port}", flush=True)
        if context.authenticator.is_open:
            print("No API keys: every request is served, as the user `local`.", file=sys.stderr, flush=True)
        if not env.debug_requested():  # else the command line has started it already
            log.start()
        _collect_less()
        server = _Server(config, context)
        await server.serve(sockets=[listener])
    return 0


def _collect_less() -> None:
    """Keep what has been imported out of garbage collections, each of which took longer than a request does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


class _Server(uvicorn.Server):
    """Ends live streams before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, context: ServiceContext) -> None:
        super().__init__(config)
        self._context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.end_waiting()
        await super().shutdown(sockets)


def bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends without delay only where the protocol is named; else every answer waits 40 ms for an acknowledgement
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(1024)  # from now on connections are accepted
    except OSError as err:
        listener.close()
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be used: {err.strerror}.", fix="Choose another --host or --port."
        ) from err
    return listener
