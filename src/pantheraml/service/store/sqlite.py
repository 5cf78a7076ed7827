"""aiosqlite with one visit to the connection's thread per statement, or none.

For each statement SQLAlchemy asks for a cursor, executes, fetches and closes; at the end of a block that only read it
rolls back what never began. As five visits, these took most of the time of a short read. A few rows are read in less
time than one visit takes.
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
    def __init__(self, connector: Callable[[], sqlite3.Connection], *, at_once: bool) -> None:
        """`at_once`: execute statements in the thread of the caller."""
        super().__init__(connector, iter_chunk_size=64)
        self._at_once = at_once
        self._thread.daemon = True
        self._asked = self._answered = 0

    @property
    def inner(self) -> sqlite3.Connection:
        return self._conn

    async def visit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the connection's thread."""
        if self._at_once:
            return function(*arguments)
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


async def connect(path: str | None, *, at_once: bool = False) -> OneVisitConnection:
    """None: a database in memory."""

    def open_it() -> sqlite3.Connection:
        return sqlite3.connect(path or ":memory:", check_same_thread=False)

    return await OneVisitConnection(open_it, at_once=at_once)  # type: ignore[return-value]
