"""Delete a model that a job has made: every copy of its weights, but not the job's events and metrics.

The row is marked first, so that a service killed in between finishes the deletion when it restarts.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.runs.supervised import SupervisedRun
from pantheraml.service.jobs.merge import FOLDER as MERGED
from pantheraml.service.jobs.results import ADAPTER_FILE
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.store.files import content_of
from pantheraml.service.store.tables import Event, File, Job

_WEIGHTS = ("adapter", "model", "checkpoints", MERGED)
"""Folders of a run."""


async def delete_model(
    database: Database, settings: Settings, job: Job, record: Callable[[AsyncSession], None]
) -> None:
    """`record` adds to the transaction."""
    copies: list[File] = []
    async with database.write() as session:
        current = await session.get_one(Job, job.id, with_for_update=True)
        current.model_deleted_at = current.model_deleted_at or time.time()
        for name in current.result_files:
            file = await session.get(File, name)
            if file is not None and file.filename == ADAPTER_FILE:
                copies.append(file)
                await session.delete(file)
        gone = {file.id for file in copies}
        current.result_files = [name for name in current.result_files if name not in gone]
        await checkpoints_removed(session, job.id, "with the model")
        record(session)
    for file in copies:
        content_of(file, settings.files).unlink(missing_ok=True)
    await asyncio.to_thread(_remove_weights, settings.jobs, job.id)


async def delete_checkpoints(database: Database, settings: Settings, job_id: str, why: str) -> None:
    """Delete the checkpoints of a job that has ended; its model stays. The folder goes first: a service killed in
    between is asked again."""
    folder = SupervisedRun(settings.jobs.resolve() / job_id, job_id).run_dir.path / "checkpoints"
    if folder.is_dir():
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        async with database.write() as session:
            await checkpoints_removed(session, job_id, why)


async def checkpoints_removed(session: AsyncSession, job_id: str, why: str) -> None:
    """Record that the checkpoints of a job are gone."""
    saved = select(Event.step).where(Event.job_id == job_id, Event.kind == "checkpoint.saved").distinct()
    session.add_all(_removed(job_id, step, why) for step in (await session.scalars(saved)).all())


def _removed(job_id: str, step: int | None, why: str) -> Event:
    return Event(
        job_id=job_id,
        created_at=time.time(),
        level="info",
        kind="checkpoint.removed",
        message=f"Checkpoint of step {step} removed {why}",
        step=step,
        data={"step": step},
    )


async def finish_deletions(database: Database, settings: Settings) -> None:
    """Finish deletions that a killed service left incomplete."""
    async with database.read() as session:
        names = (await session.scalars(select(Job.id).where(Job.model_deleted_at.is_not(None)))).all()
    for name in names:
        await asyncio.to_thread(_remove_weights, settings.jobs, name)


def _remove_weights(jobs: Path, job_id: str) -> None:
    run = SupervisedRun(jobs.resolve() / job_id, job_id).run_dir
    for name in _WEIGHTS:
        shutil.rmtree(run.path / name, ignore_errors=True)
