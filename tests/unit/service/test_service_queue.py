"""The queue as it is shown: in the dispatcher's order, though the database has changed since it last looked."""

from __future__ import annotations

from pathlib import Path

import anyio
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.app import preparation
from pantheraml.service.auth import LOCAL_USER, SCOPES, Principal
from pantheraml.service.jobs.overview import queue_now
from pantheraml.service.jobs.states import State
from pantheraml.service.settings import Settings
from pantheraml.service.store.jobs import add_job, move
from pantheraml.service.store.tables import Job

JOBS = 250
"""More than are asked for at once."""


async def add(session: AsyncSession, name: str, *, at: float, priority: int = 0) -> None:
    known = {"owner": "a", "model": "m", "training_file": "f", "seed": 0, "hyperparameters": {}, "result_files": []}
    job = Job(id=name, config={}, plan={}, processes=9, device="cpu", created_at=at, priority=priority, **known)
    await add_job(session, job)
    await move(session, job, State.QUEUED, "queued", queued_at=at)


def test_the_queue_is_shown_in_its_order(tmp_path: Path) -> None:
    async def check() -> None:
        async with preparation(Settings(tmp_path / "data", tmp_path, cpu_slots=1)) as context:

            async def shown(limit: int | None) -> tuple[list[str | None], int]:
                async with context.database.read() as session:
                    found, length = await queue_now(
                        session, context, Principal(LOCAL_USER, frozenset(SCOPES), "k"), limit
                    )
                assert [entry.position for entry in found] == list(range(1, len(found) + 1))
                return [entry.job for entry in found], length

            assert await shown(100) == ([], 0)
            async with context.database.write() as session:
                for number in range(JOBS):
                    await add(session, f"j{number:03}", at=1e9 + number)
                await add(session, "urgent", at=1e9 + 500, priority=100)
            await context.dispatcher.reschedule()
            order = ["urgent", *(f"j{number:03}" for number in range(JOBS))]
            assert await shown(None) == (order, JOBS + 1)
            assert await shown(3) == (order[:3], JOBS + 1)
            async with context.database.write() as session:
                for name in order[:150]:
                    await move(session, await session.get_one(Job, name), State.CANCELLED, "cancelled")
                await add(session, "late", at=1e9 + 700)
                await add(session, "later", at=1e9 + 800, priority=100)
            left = [*order[150:], "late", "later"]
            assert await shown(None) == (left, len(left)), "the dispatcher has not looked since then"
            assert await shown(2) == (left[:2], len(left))
            assert await shown(1000) == (left, len(left))

    anyio.run(check)
