"""Middleware for every request: request id, allowed host names, limits, and security headers.

A page on any site can have a browser on this machine send requests to a port of loopback, or resolve its own name to it
(DNS rebinding). So `Host` must be a name of this service, and `Origin`, if there is one, too.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pantheraml.base import log
from pantheraml.service.auth import hash_key
from pantheraml.service.errors import ApiError, error_response
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import is_away

logger = log.get(__name__)

MAX_BODY_BYTES = 1 << 20
_KEYS_PER_ADDRESS = 10
"""Keys whose rate limits one address may use up."""
_UPLOADS = re.compile(r"/v1/files|/v1/uploads/[^/]+/parts")
"""Paths whose bodies have limits of their own."""
_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class Gate:
    """The outermost layer. Also turns an unexpected exception into an answer without a traceback."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._hosts = _names(settings)
        # two counters per key; a moving window sends a list of every request to a thread with each further one
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._rate = RateLimitItemPerMinute(settings.requests_per_minute)
        many = _KEYS_PER_ADDRESS * settings.requests_per_minute
        self._address_rate = RateLimitItemPerMinute(many, namespace="address")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope["request_id"] = request_id
        begin, started = time.monotonic(), False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["openai-processing-ms"] = str(round(1000 * (time.monotonic() - begin)))
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._check(scope)
            await self._app(scope, _limited(scope, receive), sending)
        except ApiError as err:
            if started:
                raise
            response = error_response(err.status, err.message, param=err.param, code=err.code)
            response.headers.update(err.headers)
            await response(scope, receive, sending)
        except ClientDisconnect:
            logger.info("%s %s: the client hung up (%s)", scope["method"], scope["path"], request_id)
        except Exception as err:
            request = f"{scope['method']} {scope['path']} ({request_id})"
            if is_away(err):
                logger.error("%s: the database does not answer: %s", request, err)
                status, message = 503, "The database of the service does not answer; try again later."
            else:
                logger.exception("%s failed", request)
                status = 500
                message = f"The service failed; its log tells why under the request id {request_id}."
            if started:
                raise
            await error_response(status, message)(scope, receive, sending)

    async def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise ApiError(400, "The address holds a null character.")  # which PostgreSQL rejects in queries
        if not self._is_ours(headers.get("host", "")):
            raise ApiError(403, "This service is not reached under that name (header Host).", code="foreign_host")
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(urlsplit(origin).netloc):
            raise ApiError(
                403, "Requests from pages of other sites are refused (header Origin).", code="foreign_origin"
            )
        length = headers.get("content-length")
        if length is not None and not length.isdigit():
            raise ApiError(400, "The header Content-Length is not a number.")
        if length is not None and int(length) > MAX_BODY_BYTES and not _UPLOADS.fullmatch(scope["path"]):
            raise _body_too_large()
        client = scope.get("client")
        address = client[0] if client else ""
        if "authorization" in headers:
            await self._count(self._rate, hash_key(headers["authorization"]))
            await self._count(self._address_rate, address)  # against guessing keys
        else:
            await self._count(self._rate, address)

    async def _count(self, rate: RateLimitItemPerMinute, who: str) -> None:
        if not await self._limiter.hit(rate, who):
            err = ApiError(429, "Too many requests; the header Retry-After says when to try again.", code="rate_limit")
            reset, _ = await self._limiter.get_window_stats(rate, who)
            err.headers["retry-after"] = str(max(1, round(reset - time.time())))
            raise err

    def _is_ours(self, netloc: str) -> bool:
        try:
            return (urlsplit(f"//{netloc}").hostname or "").rstrip(".") in self._hosts
        except ValueError:
            return False


def _names(settings: Settings) -> frozenset[str]:
    names: Iterable[str] = (settings.host, *settings.allowed_hosts)
    return frozenset(name.lower() for name in (*names, "localhost", "127.0.0.1", "::1"))


def _limited(scope: Scope, receive: Receive) -> Receive:
    """A body without a Content-Length is counted while it arrives."""
    if _UPLOADS.fullmatch(scope["path"]):
        return receive
    total = 0

    async def counting() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MAX_BODY_BYTES:
            raise _body_too_large()
        return message

    return counting


def _body_too_large() -> ApiError:
    return ApiError(413, f"The body is larger than the {MAX_BODY_BYTES:,} bytes allowed here.", code="too_large")
