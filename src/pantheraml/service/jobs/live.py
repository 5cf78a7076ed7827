"""News of a job for its live streams, read and encoded once for all that wait for the same.

Hundreds may follow one job. Each of them asking the database for every step would be most of what the service does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.sse import format_sse_event
from sqlalchemy import select

from pantheraml.service.jobs.notifier import Notifier
from pantheraml.service.jobs.states import ENDED
from pantheraml.service.schemas.fine_tuning import SHOWN, event_object
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Event, Job

_BATCH = 500


@dataclass(frozen=True)
class News:
    content: bytes
    """Server-sent events; empty: there is nothing new."""
    last: int
    """Id of the last event up to now."""
    more: bool
    """There may be more at once."""
    ended: bool
    """The job has ended, and this tells it."""


class NewsDesk:
    def __init__(self, database: Database, notifier: Notifier) -> None:
        self._database, self._notifier = database, notifier
        self._asked: dict[tuple[str, int, int], asyncio.Task[News]] = {}

    async def after(self, job_id: str, last: int) -> News:
        """Events after the one with the id `last`."""
        # an answer that was asked for before the newest notification may not know what that was about
        key = (job_id, last, self._notifier.notifications)
        task = self._asked.get(key)
        if task is None:
            task = self._asked[key] = asyncio.create_task(self._read(job_id, last))
            task.add_done_callback(lambda _: self._asked.pop(key))
        return await asyncio.shield(task)

    async def _read(self, job_id: str, last: int) -> News:
        query = select(*SHOWN).where(Event.job_id == job_id, Event.id > last).order_by(Event.id).limit(_BATCH)
        async with self._database.glance() as session:
            state = await session.scalar(select(Job.state).where(Job.id == job_id))
            rows: Sequence[Any] = (await session.execute(query)).all()  # second: what came before the end is among them
        told = [(f"ftevent-{row.id}", row.kind, json.dumps(event_object(row), separators=(",", ":"))) for row in rows]
        content = [format_sse_event(data_str=text, event=kind, id=name) for name, kind, text in told]
        more = len(rows) == _BATCH
        ended = state in ENDED and not more
        if ended:
            content.append(format_sse_event(data_str=json.dumps({"state": state}), event="end"))
        return News(b"".join(content), rows[-1].id if rows else last, more, ended)
