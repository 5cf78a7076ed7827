"""Sessions of the dashboard: a key is sent once, and exchanged for a cookie that scripts cannot read.

Other sites cannot use the cookie: it is SameSite=Strict, and a request that changes something needs a header that no
form can send. Revoking the key ends its sessions.
"""

from __future__ import annotations

import hashlib
import secrets
import time

from fastapi import Request, Response
from sqlalchemy import Select, delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.errors import ApiError
from pantheraml.service.store.tables import Key, PageSession

SESSION_SECONDS = 12 * 3600.0
PAGE_HEADER = "x-requested-with"
PAGE_HEADER_VALUE = "pantheraml"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def cookie_name(request: Request) -> str:
    """One per port: a browser sends cookies to all ports of a host, and two services would sign each other out."""
    port = request.url.port
    return "pantheraml_session" if port is None else f"pantheraml_session_{port}"


def refuse_forgery(request: Request) -> None:
    """ApiError if a request with the cookie could come from a form on another site (CSRF)."""
    if request.method not in _SAFE_METHODS and request.headers.get(PAGE_HEADER) != PAGE_HEADER_VALUE:
        message = f"A change by session cookie needs the header `{PAGE_HEADER}: {PAGE_HEADER_VALUE}`."
        raise ApiError(403, message, code="missing_header")


def key_of(cookie: str) -> Select[Key]:
    """Query for the key of a session."""
    live = (PageSession.hash == _hash(cookie)) & (PageSession.expires_at > time.time())
    return select(Key).join(PageSession, PageSession.key_id == Key.id).where(live)


async def open_session(session: AsyncSession, key_id: str) -> str:
    """Add a session, and remove expired ones; return the text of its cookie, which is not stored."""
    cookie, now = secrets.token_urlsafe(32), time.time()
    await session.execute(delete(PageSession).where(PageSession.expires_at <= now))
    session.add(PageSession(hash=_hash(cookie), key_id=key_id, created_at=now, expires_at=now + SESSION_SECONDS))
    return cookie


async def close_session(session: AsyncSession, cookie: str) -> Key | None:
    """Remove it; return the key that it stood for."""
    found = delete(PageSession).where(PageSession.hash == _hash(cookie)).returning(PageSession.key_id)
    key_id = await session.scalar(found)
    return None if key_id is None else await session.get(Key, key_id)


def give_cookie(request: Request, response: Response, cookie: str) -> None:
    """Set the session cookie, without an age, so that the browser drops it when closed."""
    encrypted = request.headers.get("origin", "").startswith("https://")  # also behind a proxy with TLS
    response.set_cookie(cookie_name(request), cookie, path="/", httponly=True, samesite="strict", secure=encrypted)


def take_cookie(request: Request, response: Response) -> None:
    response.delete_cookie(cookie_name(request), path="/", httponly=True, samesite="strict")


def _hash(cookie: str) -> str:
    return hashlib.sha256(cookie.encode()).hexdigest()
