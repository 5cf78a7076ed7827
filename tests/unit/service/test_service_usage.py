"""Accounts: hours within a period, per user and job, with what is not known left out."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from pantheraml.base import events
from pantheraml.service.jobs.ingest import energy_of
from pantheraml.service.jobs.usage import HALF_LIFE_SECONDS, cost_of, device_seconds
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Stretch
from pantheraml.service.store.usage import Used, used

HOUR = 3600.0


def stretch(
    owner: str, job: str, start: float, end: float | None, *, device: str = "cuda", energy: float | None = None
):  # type: ignore[no-untyped-def]
    return Stretch(
        job_id=job,
        token=1,
        owner=owner,
        model="m",
        device=device,
        devices=2,
        started_at=start * HOUR,
        ended_at=None if end is None else end * HOUR,
        energy_joules=energy,
    )


def test_hours_are_those_within_the_period(tmp_path: Path) -> None:
    async def ask(**period: object) -> list[Used]:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        try:
            async with database.read() as session:
                return await used(session, **{"start": None, "owner": None, "by_job": False, **period})  # type: ignore[arg-type]
        finally:
            await database.close()

    async def check() -> None:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        await database.migrate()
        async with database.write() as session:
            session.add_all(
                [
                    stretch("ann", "j1", 0, 2, energy=5.0),
                    stretch("ann", "j1", 3, 4),
                    stretch("ann", "j2", 9, None, energy=2.0),
                    stretch("bob", "j3", 1, 2, device="cpu"),
                ]
            )
        await database.close()
        ann, bob = await ask(end=10 * HOUR)
        assert (ann.jobs, ann.starts, ann.gpu_hours, ann.energy_joules) == (2, 3, pytest.approx(8.0), 7.0)
        assert (bob.user, bob.gpu_hours, bob.cpu_slot_hours, bob.energy_joules) == (
            "bob",
            0.0,
            pytest.approx(2.0),
            None,
        )
        (part,) = await ask(start=1 * HOUR, end=3.5 * HOUR, owner="ann")
        assert part.gpu_hours == pytest.approx(2 * (1 + 0.5))
        jobs = await ask(end=10 * HOUR, owner="ann", by_job=True)
        assert [(each.job, each.gpu_hours) for each in jobs] == [("j1", pytest.approx(6.0)), ("j2", pytest.approx(2.0))]

    anyio.run(check)


def test_what_was_used_long_ago_counts_less(tmp_path: Path) -> None:
    """Half for each half-life since it was used, not since the job last changed its state."""
    now = 1000 * HOUR

    async def check() -> dict[str, float]:
        database = Database(f"sqlite+aiosqlite:///{tmp_path / 'test.db'}")
        try:
            await database.migrate()
            async with database.write() as session:
                session.add_all(
                    [
                        stretch("lately", "j1", 999.99, None),
                        stretch("half-a-day-ago", "j2", 987.99, 988),
                        stretch("both", "j3", 999.99, 1000),
                        stretch("both", "j3", 987.99, 988),
                        stretch("for-ages", "j4", 0, None),
                        stretch("long-ago", "j5", 0, 900),
                    ]
                )
            async with database.read() as session:
                return await device_seconds(session, now)
        finally:
            await database.close()

    found = anyio.run(check)
    assert found["lately"] == pytest.approx(2 * 36, rel=1e-3), "two devices"
    assert found["half-a-day-ago"] == pytest.approx(36, rel=1e-3)
    assert found["both"] == pytest.approx(3 * 36, rel=1e-3)
    assert found["for-ages"] == pytest.approx(2 * HALF_LIFE_SECONDS / 0.6931, rel=1e-3), "it cannot grow without end"
    assert "long-ago" not in found


def test_energy_is_the_sum_of_what_is_known() -> None:
    def sample(*joules: float | None) -> events.HardwareSampled:
        return events.HardwareSampled(seconds=1, samples=1, energy_joules=list(joules), cpu_percent=None, ram_bytes=0)

    assert energy_of([sample(1.0, None), sample(2.0, 3.0)]) == 6.0
    two_cards = sample(6.0, 4.0).model_copy(update={"indices": [0, 3]})
    assert energy_of([two_cards], {0: 3, 1: 5, 3: 1}) == 2.0 + 4.0, "of each card what its holders share"
    assert energy_of([two_cards], {}) == 10.0, "holders that have just left"
    assert energy_of([sample(None)]) is None
    assert energy_of([]) is None


@pytest.mark.seed("S4-145")
def test_no_cost_without_a_price() -> None:
    assert cost_of(2.0, None) is None
    assert cost_of(2.0, 1.5) == 3.0
