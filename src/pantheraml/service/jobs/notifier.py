"""Wakes tasks that wait for news of a job, so that they need not poll the database."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Notifier:
    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self.closed = False
        self.notifications = 0
        """How many there were."""

    def notify(self, job_id: str) -> None:
        self.notifications += 1
        for event in self._waiting.pop(job_id, ()):
            event.set()

    def close(self) -> None:
        """Wake all waiters for good: the service is shutting down."""
        self.closed = True
        for job_id in list(self._waiting):
            self.notify(job_id)

    @contextlib.contextmanager
    def listening(self, job_id: str) -> Iterator[asyncio.Event]:
        """Return an event that the next notification sets. Call it before reading the database, so that no news is
        missed."""
        event = asyncio.Event()
        if self.closed:
            event.set()
        else:
            self._waiting.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            self._waiting.get(job_id, set()).discard(event)
