"""The database: migrations make the tables that the code expects, and writers do not fail each other."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiosqlite
import anyio
import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError, OperationalError

from pantheraml.base.errors import ConfigError
from pantheraml.service.app import preparation
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database, is_away, is_full
from pantheraml.service.store.tables import Audit, Base, WebhookEndpoint


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


def test_a_read_is_one_visit_to_the_thread_of_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[str] = []

    async def check() -> None:
        async with opened(tmp_path) as database:
            execute = aiosqlite.Connection._execute

            async def counted(connection: Any, function: Any, *arguments: Any, **named: Any) -> Any:
                visits.append(str(function))
                return await execute(connection, function, *arguments, **named)  # type: ignore[no-untyped-call]

            monkeypatch.setattr(aiosqlite.Connection, "_execute", counted)
            for reading, expected in ((database.read, 1), (database.glance, 0)):
                async with reading() as session:
                    await session.execute(text("SELECT 1"))  # with a connection to open, the first time
                visits.clear()
                async with reading() as session:
                    assert (await session.execute(text("SELECT 1"))).scalar() == 1
                assert len(visits) == expected

    anyio.run(check)


def test_a_writer_that_is_cancelled_while_it_begins_holds_no_lock(tmp_path: Path) -> None:
    """Its thread may begin the transaction after the task has gone."""

    async def write(database: Database) -> None:
        async with database.write() as session:
            await session.execute(text("SELECT count(*) FROM audit"))
            await anyio.sleep(10)

    async def check() -> None:
        async with opened(tmp_path) as one, opened(tmp_path) as other:
            for pause in (0.0, 0.0005, 0.001, 0.005) * 5:
                with anyio.move_on_after(pause):
                    await write(one)
            with anyio.fail_after(20):
                async with other.write() as session:
                    session.add(Audit(created_at=1, user="a", action="b", target="c", request_id=None))

    anyio.run(check)


def test_a_database_belongs_to_one_data_folder(tmp_path: Path) -> None:
    """To the jobs of another one, their folders and processes would look lost."""

    async def start(folder: Path) -> None:
        url = f"sqlite+aiosqlite:///{tmp_path / 'shared.db'}"
        async with preparation(Settings(folder, tmp_path, database_url=url)):
            pass

    async def check() -> None:
        await start(tmp_path / "one")
        await start(tmp_path / "one")
        with pytest.raises(ConfigError, match=r"belongs to a data folder other than .*two"):
            await start(tmp_path / "two")
        (tmp_path / "one").rename(tmp_path / "moved")
        await start(tmp_path / "moved")

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


def test_a_failed_statement_does_not_tell_its_values(tmp_path: Path) -> None:
    """The error is logged."""

    async def fail() -> str:
        async with opened(tmp_path) as database:
            endpoint = {"id": "whe-1", "owner": "ann", "name": "a", "url": "https://example.com", "event_types": []}
            with pytest.raises(DBAPIError) as caught:
                for _ in range(2):
                    async with database.write() as session:
                        session.add(WebhookEndpoint(**endpoint, secret="whsec_x", created_at=1.0, updated_at=1.0))
            return str(caught.value)

    told = anyio.run(fail)
    assert "INSERT INTO webhook_endpoints" in told
    assert "whsec_x" not in told
