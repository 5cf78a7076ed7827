"""State set under `/multigpu`: disabled devices, and the settings of each user's trainings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.store.tables import DisabledDevice, UserSettings


async def disabled_devices(session: AsyncSession) -> dict[str, DisabledDevice]:
    """Row of each disabled device."""
    return {row.resource: row for row in (await session.scalars(select(DisabledDevice))).all()}


async def disable(session: AsyncSession, names: Iterable[str], user: str, reason: str | None) -> None:
    for name in names:
        await session.merge(DisabledDevice(resource=name, user=user, reason=reason, created_at=time.time()))


async def enable(session: AsyncSession, names: Iterable[str]) -> None:
    await session.execute(delete(DisabledDevice).where(DisabledDevice.resource.in_(list(names))))


async def settings_of(session: AsyncSession, user: str) -> UserSettings:
    """Return the user's row, or an empty one that is not stored."""
    found = await session.get(UserSettings, user)
    return found or UserSettings(user=user, gpus=None, training=None)


async def store_settings(session: AsyncSession, user: str, **columns: Mapping[str, Any]) -> None:
    row = await session.get(UserSettings, user)
    if row is None:
        row = UserSettings(user=user, gpus=None, training=None)
        session.add(row)
    for name, value in columns.items():
        setattr(row, name, dict(value))
