"""Jobs that ended long ago go, with what they left; models stay, and so do jobs that have not ended."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
from sqlalchemy import select, update

from pantheraml.service.jobs.retention import forget_old
from pantheraml.service.jobs.states import State
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.store.jobs import add_job
from pantheraml.service.store.tables import Audit, Event, Job

DAY = 86400.0
JOBS = {
    "failed": (State.FAILED, 8, None, None),
    "lately": (State.FAILED, 6, None, None),
    "paused": (State.PAUSED, 800, None, None),
    "model": (State.SUCCEEDED, 8, "ft:m", None),
    "deleted": (State.SUCCEEDED, 8, "ft:n", 1.0),
}
"""State, its age in days, model, and when that was deleted."""


def test_what_is_removed(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tmp_path, keep_days=7)
    for name in JOBS:
        (settings.jobs / name / "run/checkpoints/step-10").mkdir(parents=True)
        (settings.jobs / name / "run/adapter").mkdir()

    def left() -> dict[str, list[str]]:
        return {path.name: sorted(inner.name for inner in path.glob("run/*")) for path in settings.jobs.iterdir()}

    async def check() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        try:
            await database.migrate()
            async with database.write() as session:
                for name, (state, age, model, deleted) in JOBS.items():
                    known = {"owner": "a", "model": "m", "training_file": "f", "seed": 0, "hyperparameters": {}}
                    job = Job(id=name, config={}, plan={}, processes=1, device="cpu", created_at=1.0, **known)
                    job.result_files, job.fine_tuned_model, job.model_deleted_at = [], model, deleted
                    await add_job(session, job)
                    saved = {"kind": "checkpoint.saved", "level": "info", "message": "saved", "step": 10, "data": {}}
                    session.add(Event(job_id=name, created_at=1.0, **saved))
                    at = time.time() - age * DAY
                    await session.execute(update(Job).where(Job.id == name).values(state=state, state_at=at))
            await forget_old(database, Settings(tmp_path, tmp_path))
            assert set(left()) == set(JOBS), "without --keep-days nothing goes"
            for _ in range(2):
                await forget_old(database, settings)
                async with database.read() as session:
                    assert {*await session.scalars(select(Job.id))} == {"lately", "paused", "model"}
                    assert {*await session.scalars(select(Event.job_id))} == {"lately", "paused", "model"}
                    removed = select(Event.job_id).where(Event.kind == "checkpoint.removed")
                    assert [*await session.scalars(removed)] == ["model"], "once"
                    assert {*await session.scalars(select(Audit.target))} == {"failed", "deleted"}
        finally:
            await database.close()

    anyio.run(check)
    whole = ["adapter", "checkpoints"]
    assert left() == {"lately": whole, "paused": whole, "model": ["adapter"]}
