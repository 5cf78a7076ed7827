"""Authentication and scopes.

A key is `pml-` and 256 random bits; its SHA-256 is kept, since a slow hash protects weak passwords, not random keys.
Scopes: `read` one's own files and jobs, `submit` new ones and change them, `admin` everybody's. A service that has no
keys and listens on loopback serves everybody as the user `local` with all scopes.

A program sends its key with every request. A browser exchanges it once for a session cookie (`sessions`).
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, Request
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service import sessions
from pantheraml.service.errors import ApiError
from pantheraml.service.ids import new_id
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Key

Scope = Literal["read", "submit", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "submit", "admin")
_INCLUDES: dict[str, frozenset[str]] = {
    "read": frozenset({"read"}),
    "submit": frozenset({"read", "submit"}),
    "admin": frozenset({"read", "submit", "admin"}),
}
PREFIX = "pml-"
LOCAL_USER = "local"
_LOOK_FOR_KEYS_SECONDS = 1.0


@dataclass(frozen=True)
class Principal:
    user: str
    scopes: frozenset[str]
    key_id: str | None = None

    def allows(self, scope: Scope) -> bool:
        return scope in self.scopes

    @property
    def owner(self) -> str | None:
        """Owner whose files and jobs it may access; None: everybody's."""
        return None if self.allows("admin") and self.key_id is not None else self.user


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def create_key(session: AsyncSession, user: str, scope: Scope, expires_at: float | None) -> tuple[Key, str]:
    """Add a key; return it and its text, which is not kept."""
    text = PREFIX + secrets.token_urlsafe(32)
    scopes = sorted(_INCLUDES[scope])
    key = Key(
        id=new_id("key"),
        user=user,
        hash=hash_key(text),
        scopes=scopes,
        created_at=time.time(),
        expires_at=expires_at,
        revoked_at=None,
    )
    session.add(key)
    return key, text


async def has_keys(database: Database) -> bool:
    """Return True if a key was ever created: revoking the last one does not open the service to everybody."""
    async with database.glance() as session:
        return await session.scalar(select(Key.id).limit(1)) is not None


class Authenticator:
    """Finds the principal of a request."""

    def __init__(self, database: Database, *, is_open: bool, insecure: bool) -> None:
        """`insecure`: also serve other machines while there are no keys."""
        self._database, self._insecure = database, insecure
        self.is_open = is_open
        """Treat every request as the user `local`, until the first key is created."""
        self._looked_at = time.monotonic()

    async def principal(self, request: Request) -> Principal:
        if self.is_open and time.monotonic() - self._looked_at > _LOOK_FOR_KEYS_SECONDS:
            self._looked_at = time.monotonic()
            self.is_open = not await has_keys(self._database)
        if self.is_open:
            if not self._insecure and not _from_here(request):
                # an application that mounts our routes may listen on any address, whatever our settings say
                raise _unauthorized("There are no API keys here: only programs of this machine are served.")
            return Principal(LOCAL_USER, _INCLUDES["admin"])
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        text = text.strip()
        cookie = request.cookies.get(sessions.cookie_name(request))
        if not request.headers.get("authorization") and cookie:
            sessions.refuse_forgery(request)
            query = sessions.key_of(cookie)
        elif scheme.lower() == "bearer" and text:
            query = select(Key).where(Key.hash == hash_key(text))
        else:
            raise _unauthorized("You did not provide an API key: send the header `Authorization: Bearer KEY`.")
        async with self._database.glance() as session:
            key = await session.scalar(query)
        now = time.time()
        if key is None or key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
            raise _unauthorized("This API key is not known, was revoked, or has expired.")
        return Principal(key.user, frozenset(key.scopes), key.id)


_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers by which a proxy says for whom it asks."""


def _from_here(request: Request) -> bool:
    """Whether a program of this machine asks: from a loopback address, or one that is no network address (a Unix
    socket), and not as a proxy for somebody else."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    try:
        return request.client is None or ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return True


def _unauthorized(message: str) -> ApiError:
    err = ApiError(401, message, code="invalid_api_key")
    err.headers["www-authenticate"] = "Bearer"
    return err


class Require:
    """Dependency of a route: the principal, if it has the scope."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Principal:
        authenticator: Authenticator = request.app.state.context.authenticator
        principal = await authenticator.principal(request)
        if not principal.allows(self.scope):
            raise ApiError(403, f"This needs an API key with the scope `{self.scope}`.", code="insufficient_scope")
        return principal


Reader = Annotated[Principal, Depends(Require("read"))]
Submitter = Annotated[Principal, Depends(Require("submit"))]
Admin = Annotated[Principal, Depends(Require("admin"))]
