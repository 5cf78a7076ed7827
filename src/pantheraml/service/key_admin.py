"""Create, list and revoke keys from the command line, whether or not the service is running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from sqlalchemy import select

from pantheraml.base.errors import ConfigError
from pantheraml.base.private import private_files
from pantheraml.service.auth import Scope, create_key
from pantheraml.service.settings import Settings, claim_folder
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Audit, Key

Result = TypeVar("Result")
OPERATOR = "operator"
"""User in the audit log for actions on the command line."""


class KeyInfo(BaseModel):
    """A key without its secret."""

    id: str
    user: str
    scopes: list[str]
    created_at: float
    expires_at: float | None
    status: str
    """active, expired or revoked."""


def create(settings: Settings, user: str, scope: Scope, expires_at: float | None) -> tuple[KeyInfo, str]:
    """Return the new key and its text, which is shown this once."""
    if not user or len(user) > 64 or not user.isprintable() or ":" in user:
        raise ConfigError("A user is named by 1 to 64 printable characters without a colon.")

    async def work(database: Database) -> tuple[KeyInfo, str]:
        async with database.write() as session:
            key, text = await create_key(session, user, scope, expires_at)
            session.add(_audit("key.create", key.id))
        return _info(key), text

    return _run(settings, work)


def list_all(settings: Settings) -> list[KeyInfo]:
    async def work(database: Database) -> list[KeyInfo]:
        async with database.read() as session:
            return [_info(key) for key in (await session.scalars(select(Key).order_by(Key.created_at))).all()]

    return _run(settings, work)


def revoke(settings: Settings, key_id: str) -> KeyInfo:
    async def work(database: Database) -> KeyInfo:
        async with database.write() as session:
            key = await session.get(Key, key_id)
            if key is None:
                raise ConfigError(f"There is no key {key_id!r}.", fix="See `pantheraml keys list`.")
            key.revoked_at = key.revoked_at or time.time()
            session.add(_audit("key.revoke", key.id))
        return _info(key)

    return _run(settings, work)


def _audit(action: str, target: str) -> Audit:
    return Audit(created_at=time.time(), user=OPERATOR, action=action, target=target, request_id=None)


def _info(key: Key) -> KeyInfo:
    expired = key.expires_at is not None and key.expires_at <= time.time()
    status = "revoked" if key.revoked_at is not None else "expired" if expired else "active"
    return KeyInfo(
        id=key.id,
        user=key.user,
        scopes=key.scopes,
        created_at=key.created_at,
        expires_at=key.expires_at,
        status=status,
    )


def _run(settings: Settings, work: Callable[[Database], Awaitable[Result]]) -> Result:
    async def whole() -> Result:
        claim_folder(settings.data_dir)
        database = Database(settings.url)
        try:
            await database.migrate()
            return await work(database)
        finally:
            await database.close()

    with private_files():
        return asyncio.run(whole())
