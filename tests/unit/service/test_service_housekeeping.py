"""Expired files go, files in use stay, and so does what may still get its row."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio

from pantheraml.service.jobs.housekeeping import tidy, tidy_uploads
from pantheraml.service.jobs.states import State
from pantheraml.service.store.database import Database
from pantheraml.service.store.jobs import add_job, move
from pantheraml.service.store.tables import File, Job, Upload, UploadPart


def file(name: str, expires_at: float | None) -> File:
    return File(
        id=name, owner="a", purpose="user_data", filename="a", bytes=1, sha256="", created_at=1.0, expires_at=expires_at
    )


def job(name: str, training_file: str) -> Job:
    known = {"owner": "a", "model": "m", "seed": 0, "hyperparameters": {}, "config": {}, "plan": {}}
    return Job(
        id=name, training_file=training_file, processes=1, device="cpu", created_at=1.0, result_files=[], **known
    )


def test_tidy(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    past, future = time.time() - 1, time.time() + 1000
    for name in ("kept", "later", "expired", "in-use", "of-an-ended-job", "orphan", "young"):
        (folder / name).write_text("x")
    os.utime(folder / "orphan", (past - 4000, past - 4000))

    async def check() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        try:
            await database.migrate()
            async with database.write() as session:
                session.add_all([file("kept", None), file("later", future), file("expired", past)])
                session.add_all([file("in-use", past), file("of-an-ended-job", past)])
                await add_job(session, job("ftjob-1", "in-use"))
                ended = job("ftjob-2", "of-an-ended-job")
                await add_job(session, ended)
                await move(session, ended, State.CANCELLED, "cancelled")
            assert sorted(await tidy(database, folder)) == ["expired", "of-an-ended-job"]
            assert await tidy(database, folder) == []
        finally:
            await database.close()

    anyio.run(check)
    assert sorted(path.name for path in folder.iterdir()) == ["in-use", "kept", "later", "young"]


def upload(name: str, status: str, expires_at: float) -> Upload:
    known = {"owner": "a", "purpose": "user_data", "filename": "a", "bytes": 1, "created_at": 1.0}
    return Upload(id=name, status=status, expires_at=expires_at, **known)


def test_uploads_that_nobody_completed_go(tmp_path: Path) -> None:
    folder = tmp_path / "uploads"
    folder.mkdir()
    past, future = time.time() - 1, time.time() + 1000
    for name in ("of-the-expired", "of-the-pending", "orphan", "young"):
        (folder / name).write_text("x")
    os.utime(folder / "orphan", (past - 4000, past - 4000))

    async def check() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        try:
            await database.migrate()
            async with database.write() as session:
                session.add_all([upload("expired", "pending", past), upload("pending", "pending", future)])
                await session.flush()
                for name in ("expired", "pending"):
                    session.add(UploadPart(id=f"of-the-{name}", upload_id=name, bytes=1, created_at=1.0))
            await tidy_uploads(database, folder)
            async with database.read() as session:
                assert (await session.get_one(Upload, "expired")).status == "expired"
                assert (await session.get_one(Upload, "pending")).status == "pending"
                assert await session.get(UploadPart, "of-the-expired") is None
        finally:
            await database.close()

    anyio.run(check)
    assert sorted(path.name for path in folder.iterdir()) == ["of-the-pending", "young"]
