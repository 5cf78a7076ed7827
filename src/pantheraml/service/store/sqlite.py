"""aiosqlite with one visit to the connection's thread per statement.

For each statement SQLAlchemy asks for a cursor, executes, fetches and closes; at the end of a block that only read it
rolls back what never began. As five visits, these took most of the time of a short read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any

import aiosqlite

_Rows = Iterable[Any]


class _Cursor(aiosqlite.Cursor):
    """Has all rows of its statement as soon as that is executed."""

    def __init__(self, connection: OneVisitConnection) -> None:
        self._connection = connection
        self._rows: list[Any] = []

    async def execute(self, sql: str, parameters: Iterable[Any] | None = None) -> _Cursor:
        await self._connection.visit(self._run, "execute", sql, () if parameters is None else parameters)
        return self

    async def executemany(self, sql: str, parameters: Iterable[Iterable[Any]]) -> _Cursor:
        await self._connection.visit(self._run, "executemany", sql, parameters)
        return self

    def _run(self, method: str, sql: str, parameters: Iterable[Any]) -> None:
        """In the thread of the connection."""
        self._cursor: sqlite3.Cursor = getattr(self._connection.inner, method)(sql, parameters)
        self._rows = self._cursor.fetchall() if self._cursor.description else []

    async def fetchall(self) -> _Rows:
        return self._rows

    async def close(self) -> None:
        """Nothing is left to do: the statement has ended."""


class OneVisitConnection(aiosqlite.Connection):
    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=64)
        self._thread.daemon = True
        self._asked = self._answered = 0

    @property
    def inner(self) -> sqlite3.Connection:
        return self._conn

    async def visit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the connection's thread."""
        self._asked += 1
        return await self._execute(self._counted, function, *arguments)  # type: ignore[no-untyped-call]

    def _counted(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        finally:
            self._answered += 1

    def cursor(self) -> _Cursor:  # type: ignore[override]
        return _Cursor(self)

    async def rollback(self) -> None:
        # one whose task was cancelled may still be on its way, and begin a transaction
        if self._asked != self._answered or self.in_transaction:
            await super().rollback()


async def connect(path: str | None) -> OneVisitConnection:
    """None: a database in memory."""
    return await OneVisitConnection(lambda: sqlite3.connect(path or ":memory:", check_same_thread=False))  # type: ignore[return-value]
