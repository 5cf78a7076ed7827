"""News for live streams: one read for all that wait for the same, and none that is older than what woke them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy import event as on

from pantheraml.service.jobs.live import News, NewsDesk
from pantheraml.service.jobs.notifier import Notifier
from pantheraml.service.jobs.states import State
from pantheraml.service.store.database import Database
from pantheraml.service.store.jobs import add_job, move
from pantheraml.service.store.tables import Job


@asynccontextmanager
async def desk(path: Path) -> AsyncIterator[tuple[Database, Notifier, NewsDesk, list[str]]]:
    database, notifier, statements = Database(f"sqlite+aiosqlite:///{path / 'test.db'}"), Notifier(), list[str]()
    await database.migrate()
    known = {"owner": "a", "model": "m", "training_file": "f", "seed": 0, "hyperparameters": {}, "result_files": []}
    async with database.write() as session:
        await add_job(session, Job(id="j", config={}, plan={}, processes=1, device="cpu", created_at=1.0, **known))

    def note(*call: Any) -> None:
        statements.append(call[2])

    on.listen(Engine, "before_cursor_execute", note)
    try:
        yield database, notifier, NewsDesk(database, notifier), statements
    finally:
        on.remove(Engine, "before_cursor_execute", note)
        await database.close()


async def change(database: Database, to: State) -> None:
    async with database.write() as session:
        await move(session, await session.get_one(Job, "j"), to, f"now {to}")


def messages(news: News) -> list[str]:
    lines = news.content.decode().splitlines()
    return [json.loads(line[6:]).get("message", "end") for line in lines if line.startswith("data: ")]


def test_all_that_wait_for_the_same_share_one_read(tmp_path: Path) -> None:
    async def check() -> None:
        async with desk(tmp_path) as (database, notifier, news, statements):
            statements.clear()
            found = await asyncio.gather(*(news.after("j", 0) for _ in range(200)))
            selects = [each for each in statements if each.startswith("SELECT")]
            assert len(selects) == 2, "the state and the events, once"
            assert all(each == found[0] for each in found)
            assert messages(found[0]) == ["Created fine-tuning job"]
            assert (found[0].more, found[0].ended) == (False, False)
            await change(database, State.FAILED)
            notifier.notify("j")
            last = await news.after("j", found[0].last)
            assert (messages(last), last.ended) == (["now failed", "end"], True)

    asyncio.run(check())


def test_what_was_asked_before_a_notification_does_not_answer_after_it(tmp_path: Path) -> None:
    async def check() -> None:
        async with desk(tmp_path) as (database, notifier, news, _):
            last = (await news.after("j", 0)).last
            early = asyncio.create_task(news.after("j", last))
            await asyncio.sleep(0)
            await change(database, State.QUEUED)
            notifier.notify("j")
            assert messages(await news.after("j", last)) == ["now queued"]
            await early

    asyncio.run(check())


def test_a_reader_that_leaves_disturbs_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        async with desk(tmp_path) as (_, _, news, _):
            leaving, staying = (asyncio.create_task(news.after("j", 0)) for _ in range(2))
            await asyncio.sleep(0)
            leaving.cancel()
            assert messages(await staying) == ["Created fine-tuning job"]
            with pytest.raises(asyncio.CancelledError):
                await leaving

    asyncio.run(check())
