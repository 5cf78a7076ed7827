"""Middleware for every request: request id, allowed host names, limits, and security headers.

A page on any site can have a browser on this machine send requests to a port of loopback, or resolve its own name to it
(DNS rebinding). So `Host` must be a name of this service, and `Origin`, if there is one, the same place.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import time
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pantheraml.base import log
from pantheraml.base.text import printable
from pantheraml.service.auth import hash_key
from pantheraml.service.errors import DISK_FULL, ApiError, error_response
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import is_away, is_full

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
        self._proxies = frozenset(name.lower() for name in settings.allowed_hosts)
        self._hosts = self._proxies | {settings.host.lower(), "localhost", "127.0.0.1", "::1"}
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
            if is_full(err):
                logger.error("%s: the disk is full: %s", request, err)
                status, message = DISK_FULL, "The disk of the service is full: its operator must make room."
            elif is_away(err):
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
        self._check_names(headers, scope.get("server"))
        length = headers.get("content-length")
        if length is not None and not length.isdigit():
            raise ApiError(400, "The header Content-Length is not a number.")
        if length is not None and int(length) > MAX_BODY_BYTES and not _UPLOADS.fullmatch(scope["path"]):
            raise _body_too_large()
        client = scope.get("client")
        address = client[0] if client else ""
        who = headers.get("authorization") or headers.get("cookie")  # people behind one proxy share an address
        if who is not None:
            await self._count(self._rate, hash_key(who))
            await self._count(self._address_rate, address)  # against guessing keys
        else:
            await self._count(self._rate, address)

    async def _count(self, rate: RateLimitItemPerMinute, who: str) -> None:
        if not await self._limiter.hit(rate, who):
            err = ApiError(429, "Too many requests; the header Retry-After says when to try again.", code="rate_limit")
            reset, _ = await self._limiter.get_window_stats(rate, who)
            err.headers["retry-after"] = str(max(1, round(reset - time.time())))
            raise err

    def _check_names(self, headers: Headers, server: tuple[str, int | None] | None) -> None:
        """ApiError unless `Host` is a name of this service, and `Origin` its own page or that of a proxy before it."""
        host = _place(f"//{headers.get('host', '')}")
        if host is None or not (host[0] in self._hosts or _is_address(host[0], server)):
            name = printable(headers.get("host", ""))[:100]
            message = f"This service is not reached under the name `{name}` (header Host); --allow-host adds names."
            raise ApiError(403, message, code="foreign_host")
        if "origin" in headers:
            origin = _place(headers["origin"])
            if origin is None or not (origin[0] in self._proxies or _same(origin, host)):
                message = "Requests from pages of other sites are refused (header Origin); --allow-host adds names."
                raise ApiError(403, message, code="foreign_origin")


Place = tuple[str, int | None, str]
"""Name, port and scheme."""


def _place(address: str) -> Place | None:
    """Return name, port and scheme of an address; None: it is not an address."""
    try:
        parts = urlsplit(address)
        return (parts.hostname or "").rstrip("."), parts.port, parts.scheme
    except ValueError:
        return None


def _is_address(name: str, server: tuple[str, int | None] | None) -> bool:
    """Whether it is the address that the connection came to. A site can only give names to a browser, no addresses."""
    try:
        return server is not None and ipaddress.ip_address(name) == ipaddress.ip_address(server[0])
    except ValueError:
        return False


def _same(origin: Place, host: Place) -> bool:
    """Whether a page is one of this service. Programs at other ports of this machine show pages of others, too."""
    usual = 443 if origin[2] == "https" else 80
    return origin[0] == host[0] and (origin[1] or usual) == (host[1] or usual)


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
