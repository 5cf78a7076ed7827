"""The database: SQLite in WAL mode, or PostgreSQL by its URL; one code for both.

SQLite has one writer. A transaction that will write takes the lock at its beginning (BEGIN IMMEDIATE): one that reads
first would fail at once, without waiting, if another has written in between. A block that only reads sees, as in
PostgreSQL, what was committed before each of its statements.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from pantheraml.base.errors import ConfigError
from pantheraml.service.store import sqlite

MIGRATIONS = Path(__file__).parent / "migrations"
_WRITES = "pantheraml_writes"
_BUSY_MS = 30_000
_CLAIM = 0x70616E74
"""Number of the advisory lock."""


class Database:
    def __init__(self, url: str) -> None:
        self.is_sqlite = url.startswith("sqlite")
        self._holder: AsyncConnection | None = None
        if self.is_sqlite:
            self.engine, self._glances = _sqlite_engine(url), _sqlite_engine(url, at_once=True)
        else:
            # without values: errors go to the log, and secrets of webhooks are among them
            self.engine = create_async_engine(
                url, hide_parameters=True, pool_size=10, max_overflow=20, pool_pre_ping=True
            )
            event.listen(self.engine.sync_engine, "do_connect", _connect)
            self._glances = self.engine
        self._writing = asyncio.Lock() if self.is_sqlite else contextlib.nullcontext()
        """Writers of this process queue here, since SQLite's own waiting is a sleep that may starve one of them."""

    async def migrate(self) -> None:
        """Migrate the tables to the newest version. ConfigError if that is not possible."""
        try:
            async with self.engine.execution_options(**{_WRITES: True}).begin() as connection:
                await connection.run_sync(upgrade)
        except (DBAPIError, ConnectionError) as err:
            reason = str(getattr(err, "orig", err)).strip().partition("\n")[0]
            raise ConfigError(
                f"The database of the service cannot be used: {reason}.",
                fix="Check --database-url, and that it runs; for SQLite, service.db in --data-dir.",
            ) from err
        except CommandError as err:
            raise ConfigError(
                f"The database of the service is of another version: {err}.",
                fix="Start the version of PantheraML that wrote it, or a newer one.",
            ) from err

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(self.engine, expire_on_commit=False) as session:
            yield session

    @contextlib.asynccontextmanager
    async def glance(self) -> AsyncIterator[AsyncSession]:
        """As `read`, for few rows that an index finds: the event loop waits for SQLite, which takes microseconds."""
        async with AsyncSession(self._glances, expire_on_commit=False) as session:
            yield session

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A session whose changes are committed at the end of the block, or not at all."""
        engine = self.engine.execution_options(**{_WRITES: True})
        async with self._writing, AsyncSession(engine, expire_on_commit=False) as session, session.begin():
            yield session

    async def claim(self) -> bool:
        """Claim the database for this service until `close`; False if another service has it. SQLite needs no claim,
        since the data folder is locked. Two services on one database would each take the other's jobs for lost."""
        if self.is_sqlite:
            return True
        connection = await self.engine.connect()
        holder = await connection.execution_options(isolation_level="AUTOCOMMIT")  # no open transaction for days
        if not await holder.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _CLAIM}):
            await holder.close()
            return False
        self._holder = holder
        return True

    async def still_claimed(self) -> bool:
        """True while this service holds the database; a claim that ended with its connection is made again."""
        if self._holder is not None:
            with contextlib.suppress(DBAPIError):
                await self._holder.execute(text("SELECT 1"))
                return True
            await self._holder.close()
            self._holder = None
        return await self.claim()

    async def close(self) -> None:
        if self._holder is not None:
            await self._holder.close()
        await self._glances.dispose()
        await self.engine.dispose()


def is_full(err: BaseException) -> bool:
    """True if the disk is full, of the database or of a file, or an account on it is."""
    if isinstance(err, OSError):
        return err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    full = getattr(getattr(err, "orig", None), "sqlstate", None) == "53100"
    return isinstance(err, DBAPIError) and (full or "disk is full" in str(err.orig))


def is_away(err: BaseException) -> bool:
    """True if the database is temporarily unavailable, so that the client may retry."""
    if isinstance(err, ConnectionError | OperationalError | InterfaceError):
        return True
    state = getattr(getattr(err, "orig", None), "sqlstate", None) or ""
    return isinstance(err, DBAPIError) and (err.connection_invalidated or state.startswith(("08", "57P")))


def _connect(dialect: Any, record: object, arguments: Any, options: Any) -> Any:
    """Connect to PostgreSQL. ConnectionError for any failure."""
    try:
        return dialect.connect(*arguments, **options)
    except Exception as err:
        raise ConnectionError(f"PostgreSQL: {err}") from err


def upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _sqlite_engine(url: str, *, at_once: bool = False) -> AsyncEngine:
    creator = partial(sqlite.connect, make_url(url).database, at_once=at_once)
    # each connection has a thread to start, so none is opened for one use alone
    engine = create_async_engine(url, hide_parameters=True, pool_size=30, max_overflow=0, async_creator=creator)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # no BEGIN by the driver: `_begin_sqlite` sends it
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"busy_timeout={_BUSY_MS}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    if connection.get_execution_options().get(_WRITES):
        connection.exec_driver_sql("BEGIN IMMEDIATE")
