"""Remove what jobs leave, some days after their end: `--keep-days`.

A job without a model goes with its folder and events; accounts and the audit log keep it. One with a model keeps all
but its checkpoints, until its user deletes the model. Folders go first: if the service is killed in between, the rows
are still there, and its next one looks again.
"""

from __future__ import annotations

import asyncio
import shutil
import time

from sqlalchemy import delete, select

from pantheraml.runs.supervised import SupervisedRun
from pantheraml.service.jobs.delete_model import checkpoints_removed
from pantheraml.service.jobs.states import ENDED
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Audit, Job


async def forget_old(database: Database, settings: Settings) -> None:
    if settings.keep_days is None:
        return
    before = time.time() - 86400 * settings.keep_days
    columns = (Job.id, Job.owner, Job.fine_tuned_model.is_not(None) & Job.model_deleted_at.is_(None))
    ended = (Job.state.in_([state.value for state in ENDED]), Job.state_at < before)
    async with database.read() as session:
        old = (await session.execute(select(*columns).where(*ended))).all()
    for name, owner, has_model in old:
        folder = settings.jobs.resolve() / name
        checkpoints = SupervisedRun(folder, name).run_dir.path / "checkpoints"
        if has_model and not checkpoints.is_dir():
            continue
        await asyncio.to_thread(shutil.rmtree, checkpoints if has_model else folder, ignore_errors=True)
        async with database.write() as session:
            if has_model:
                await checkpoints_removed(session, name, f"{settings.keep_days:g} days after the end")
                continue
            await session.execute(delete(Job).where(Job.id == name))
            session.add(Audit(created_at=time.time(), user=owner, action="job.expire", target=name, request_id=None))
