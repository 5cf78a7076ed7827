"""The state machine of jobs: the table, and the one function that changes a state, for every pair of states."""

from __future__ import annotations

import ast
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

import pantheraml.service
from pantheraml.service.jobs.states import (
    ACTIVE,
    ENDED,
    OPENAI_STATUS,
    TRANSITIONS,
    ForbiddenTransitionError,
    State,
    check_transition,
)
from pantheraml.service.store.database import Database
from pantheraml.service.store.jobs import StaleJobError, add_job, move
from pantheraml.service.store.tables import Job, Lease

ALLOWED = {
    *[("validating", after) for after in ("queued", "failed", "cancelled")],
    *[("queued", after) for after in ("starting", "paused", "cancelled", "failed")],
    *[("starting", after) for after in ("running", "pausing", "cancelling", "failed", "crashed")],
    *[("running", after) for after in ("pausing", "cancelling", "succeeded", "failed", "crashed")],
    *[("pausing", after) for after in ("paused", "cancelling", "succeeded", "failed")],
    *[("paused", after) for after in ("queued", "cancelled")],
    ("cancelling", "cancelled"),
    *[("crashed", after) for after in ("queued", "failed", "cancelled")],
}
"""Written down a second time, so that a change of the table is a decision."""

PAIRS = list(itertools.product(State, State))


def new_job(name: str) -> Job:
    return Job(
        id=name,
        owner="a",
        model="m",
        training_file="file-1",
        seed=0,
        hyperparameters={},
        config={},
        plan={},
        processes=1,
        device="cpu",
        created_at=1.0,
        result_files=[],
    )


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Database]:
    database = Database(f"sqlite+aiosqlite:///{path / 'test.db'}")
    await database.migrate()
    try:
        yield database
    finally:
        await database.close()


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_table_allows_these_and_no_others(before: State, after: State) -> None:
    if (before, after) in ALLOWED:
        check_transition(before, after)
    else:
        with pytest.raises(ForbiddenTransitionError, match=f"{before} cannot become {after}"):
            check_transition(before, after)


def test_every_state_has_a_row_and_a_status_of_the_wire() -> None:
    assert set(TRANSITIONS) == set(State) == set(OPENAI_STATUS)
    assert {State.SUCCEEDED, State.FAILED, State.CANCELLED} == ENDED
    assert set(OPENAI_STATUS.values()) == {
        *("validating_files", "queued", "running", "succeeded", "failed", "cancelled")
    }


def test_move_obeys_the_table_for_every_pair(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as database:
            for number, (before, after) in enumerate(PAIRS):
                async with database.write() as session:
                    job = new_job(f"ftjob-{number}")
                    await add_job(session, job)
                    job.state = before.value
                async with database.write() as session:
                    stored = await session.get_one(Job, job.id)
                    try:
                        await move(session, stored, after, "because")
                        moved = True
                    except ForbiddenTransitionError:
                        moved = False
                async with database.read() as session:
                    final = await session.get_one(Job, job.id)
                assert moved is ((before, after) in ALLOWED)
                assert final.state == (after if moved else before)

    anyio.run(check)


def test_a_stale_view_of_a_job_changes_nothing(tmp_path: Path) -> None:
    """Another transaction has moved the job, or started it again, since it was read."""

    async def check() -> None:
        async with opened(tmp_path) as database:
            async with database.write() as session:
                await add_job(session, new_job("ftjob-1"))
            async with database.read() as session:
                stale = await session.get_one(Job, "ftjob-1")
            async with database.write() as session:
                await move(session, await session.get_one(Job, "ftjob-1"), State.QUEUED, "queued")
            with pytest.raises(StaleJobError):
                async with database.write() as session:
                    await move(session, stale, State.CANCELLED, "late")
            stale.state, stale.token = State.QUEUED, 7
            with pytest.raises(StaleJobError):
                async with database.write() as session:
                    await move(session, stale, State.CANCELLED, "of another start")
            async with database.read() as session:
                assert (await session.get_one(Job, "ftjob-1")).state == State.QUEUED

    anyio.run(check)


def test_devices_are_free_as_soon_as_a_job_is_not_active(tmp_path: Path) -> None:
    async def check() -> None:
        async with opened(tmp_path) as database:
            for after in (State.CANCELLING, State.CRASHED):
                async with database.write() as session:
                    job = new_job(f"ftjob-{after}")
                    await add_job(session, job)
                    await move(session, job, State.QUEUED, "queued")
                    session.add(Lease(resource=f"cpu:{after}", job_id=job.id, token=1, created_at=0.0))
                    await move(session, job, State.STARTING, "start", token=1)
                    await move(session, job, after, "end")
                async with database.read() as session:
                    held = await session.get(Lease, f"cpu:{after}")
                assert (held is not None) is (after in ACTIVE)

    anyio.run(check)


def test_no_other_code_assigns_a_state() -> None:
    root = Path(pantheraml.service.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            parts = [part for target in targets for part in ast.walk(target)]
            if any(
                isinstance(part, ast.Attribute) and part.attr == "state" and ast.unparse(part) == "job.state"
                for part in parts
            ):
                found.append(path.relative_to(root).as_posix())
    assert found == ["store/jobs.py"], "only add_job sets the first state; move changes it by its UPDATE"
