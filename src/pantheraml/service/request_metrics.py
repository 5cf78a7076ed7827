"""Request latency by route: the outermost middleware, so that requests refused by the gate count too."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._seconds = Histogram(
            "pantheraml_api_request_seconds",
            "Seconds until an answer began, by the route's template.",
            ("method", "route", "status"),
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        self._seconds.labels(method if method in _METHODS else "other", route, str(status)).observe(seconds)


class MeasureRequests:
    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                # paths without a route get no label: anyone could make up any number of them
                route = getattr(scope.get("route"), "path", "unknown")
                self._metrics.note(scope["method"], route, message["status"], time.perf_counter() - begin)
            await send(message)

        await self._app(scope, receive, sending)
