"""Alerts of running jobs become events, and messages to the endpoints of their owners, each once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from sqlalchemy import select

from pantheraml.base import events
from pantheraml.devices.health import Health
from pantheraml.service.jobs.alarm import Alarm
from pantheraml.service.jobs.alerts import LOSSES
from pantheraml.service.store.database import Database
from pantheraml.service.store.tables import Event, Job, Lease, WebhookDelivery, WebhookEndpoint
from pantheraml.service.store.webhooks import EVENT_TYPES
from pantheraml.service.webhooks.signing import new_secret, signed_headers
from tests.unit.service.test_service_alerts import step

SECRET = new_secret()


def job(name: str, owner: str) -> Job:
    now = time.time()
    return Job(
        id=name,
        owner=owner,
        state="running",
        model="tiny",
        training_file="file-1",
        seed=1,
        hyperparameters={},
        config={},
        plan={},
        processes=1,
        device="cuda",
        created_at=now,
        state_at=now,
        started_at=now,
        token=1,
        result_files=[],
    )


def endpoint(owner: str, *types: str) -> WebhookEndpoint:
    return WebhookEndpoint(
        id=f"whe-{owner}-{len(types)}",
        owner=owner,
        name="a",
        url="https://example.com",
        event_types=list(types),
        secret=SECRET,
        created_at=1.0,
        updated_at=1.0,
    )


def sick(gpu: int) -> dict[int, Health]:
    return {gpu: Health(status="fail", reasons=("3 uncorrected ECC error(s)",))}


def rising() -> list[events.EventBase]:
    moment = time.time()
    return [step(loss, moment, 100.0) for loss in [1.0] * 50 + [9.0] * LOSSES]


async def told_of(
    path: Path, health: Callable[[], dict[int, Health]], found: list[events.EventBase], stall: float
) -> Any:
    """Look at the job of ann twice; events of alerts, and what endpoints are to be told."""
    database = Database(f"sqlite+aiosqlite:///{path / 'test.db'}")
    try:
        await database.migrate()
        async with database.write() as session:
            running = job("ftjob-1", "ann")
            session.add_all([running, endpoint("ann", *EVENT_TYPES), endpoint("ann"), endpoint("bob", *EVENT_TYPES)])
            await session.flush()
            session.add(Lease(resource="gpu:1", job_id="ftjob-1", token=1, created_at=1.0))
        alarm = Alarm(database, stall, health)
        await alarm.look(running, [])
        await alarm.look(running, found)
        await alarm.look(running, [])
        async with database.read() as session:
            alerts = (await session.scalars(select(Event).where(Event.kind.startswith("alert.")))).all()
            messages = (await session.scalars(select(WebhookDelivery))).all()
        return [event.kind for event in alerts], [(each.endpoint_id, each.id, each.body) for each in messages]
    finally:
        await database.close()


@pytest.mark.seed("S4-119", "S4-143", "S4-144")
@pytest.mark.parametrize(
    ("health", "found", "kind", "name"),
    [
        (sick(1), [], "alert.gpu_health", "fine_tuning.job.gpu_unhealthy"),
        ({}, rising(), "alert.divergence", "fine_tuning.job.diverged"),
        (sick(0), [], None, None),
    ],
)
def test_an_alert_is_told_once_to_its_owner(
    tmp_path: Path, health: dict[int, Health], found: list[events.EventBase], kind: str | None, name: str | None
) -> None:
    kinds, messages = anyio.run(told_of, tmp_path, lambda: health, found, 3600.0)
    assert kinds == ([] if kind is None else [kind])
    assert len(messages) == len(kinds)
    for place, message_id, body in messages:
        assert place == f"whe-ann-{len(EVENT_TYPES)}", "neither another user's, nor one that did not ask"
        assert (json.loads(body)["type"], json.loads(body)["data"]["id"]) == (name, "ftjob-1")
        headers = signed_headers([SECRET], message_id, int(time.time()), body)
        with openai.OpenAI(api_key="any") as client:
            event: Any = client.webhooks.unwrap(body, headers, secret=SECRET)
        assert (event.type, event.id) == (name, message_id)
