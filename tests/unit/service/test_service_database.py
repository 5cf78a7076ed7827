"""The database: migrations make the tables that the code expects, and writers do not fail each other."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, OperationalError

from pantheraml.service.store.database import Database, is_away, is_full
from pantheraml.service.store.tables import Audit, Base


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Database]:
    database = Database(f"sqlite+aiosqlite:///{path / 'test.db'}")
    try:
        await database.migrate()
        yield database
    finally:
        await database.close()


def test_migrations_make_the_tables(tmp_path: Path) -> None:
    def differences(connection: Connection) -> list[Any]:
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))

    async def check() -> None:
        async with opened(tmp_path) as database:
            await database.migrate()  # a second time, as at every start
            async with database.engine.connect() as connection:
                assert await connection.run_sync(differences) == []
                assert (await connection.execute(text("PRAGMA journal_mode"))).scalar() == "wal"

    anyio.run(check)


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    """Each reads before it writes, which fails at once in SQLite unless the transaction began as a writer."""

    async def add(database: Database, number: int) -> None:
        async with database.write() as session:
            await session.execute(text("SELECT count(*) FROM audit"))
            await anyio.sleep(0.01)
            session.add(Audit(created_at=number, user="a", action="b", target="c", request_id=None))

    async def check() -> None:
        async with opened(tmp_path) as one, opened(tmp_path) as other:
            async with anyio.create_task_group() as group:
                for number in range(10):
                    group.start_soon(add, (one, other)[number % 2], number)
            async with one.read() as session:
                assert (await session.execute(text("SELECT count(*) FROM audit"))).scalar() == 10

    anyio.run(check)


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as database:
            try:
                async with database.write() as session:
                    session.add(Audit(created_at=1, user="a", action="b", target="c", request_id=None))
                    await session.flush()
                    raise KeyError
            except KeyError:
                pass
            async with database.read() as session:
                assert (await session.execute(text("SELECT count(*) FROM audit"))).scalar() == 0

    anyio.run(check)


@pytest.mark.parametrize(
    ("err", "full", "away"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True, False),
        (FileNotFoundError(errno.ENOENT, "gone"), False, False),
        (OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full")), True, True),
        (OperationalError("SELECT", {}, sqlite3.OperationalError("unable to open database file")), False, True),
        (DBAPIError("INSERT", {}, asyncpg.DiskFullError("could not extend file")), True, False),
        (RuntimeError("disk is full"), False, False),
    ],
)
def test_a_full_disk_is_told_apart(err: Exception, full: bool, away: bool) -> None:
    assert (is_full(err), is_away(err)) == (full, away)
