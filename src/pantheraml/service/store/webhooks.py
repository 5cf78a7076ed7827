"""Webhook deliveries, written in the transaction of the event: a service that is killed delivers them later."""

from __future__ import annotations

import json
import time
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.ids import new_id
from pantheraml.service.store.tables import Event, Job, WebhookDelivery, WebhookEndpoint

_OF_STATES = {state: f"fine_tuning.job.{state}" for state in ("succeeded", "failed", "cancelled")}
_OF_ALERTS = {
    "alert.stall": "fine_tuning.job.stalled",
    "alert.divergence": "fine_tuning.job.diverged",
    "alert.low_throughput": "fine_tuning.job.slow",
    "alert.gpu_health": "fine_tuning.job.gpu_unhealthy",
}
"""Kinds of a job's alert events."""
EVENT_TYPES = (*_OF_STATES.values(), *_OF_ALERTS.values())


def type_of(event: Event) -> str | None:
    """Return the webhook type of an event; None: not delivered."""
    if event.kind == "state":
        return _OF_STATES.get(event.data["state"])
    return _OF_ALERTS.get(event.kind) if event.data.get("active") else None


async def announce(session: AsyncSession, job: Job, event: Event) -> None:
    """Queue an event of a job for its owner's endpoints."""
    kind = type_of(event)
    if kind is None:
        return
    endpoints = (await session.scalars(select(WebhookEndpoint).where(WebhookEndpoint.owner == job.owner))).all()
    for endpoint in endpoints:
        if kind in endpoint.event_types:
            session.add(delivery(endpoint, kind, {"id": job.id, "message": event.message}))


def delivery(endpoint: WebhookEndpoint, kind: str, data: dict[str, Any]) -> WebhookDelivery:
    now, name = time.time(), new_id("evt")
    body = {"id": name, "object": "event", "type": kind, "created_at": int(now), "data": data}
    return WebhookDelivery(
        id=name,
        endpoint_id=endpoint.id,
        body=json.dumps(body),
        attempts=0,
        created_at=now,
        next_at=now,
        outcome=None,
    )
