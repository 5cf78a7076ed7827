"""Usage of each user and job."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from pantheraml.service.auth import Reader
from pantheraml.service.context import Context
from pantheraml.service.jobs.usage import cost_of
from pantheraml.service.store.usage import used
from pantheraml.specs.service_api import UsageEntry, UsageReport

router = APIRouter(prefix="/v1/usage", tags=["usage"])

Moment = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False)]


@router.get("")
async def usage(
    principal: Reader,
    context: Context,
    start: Moment = None,
    end: Moment = None,
    group_by: Literal["user", "job"] = "user",
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> UsageReport:
    """GPU-hours, energy and cost of each user or job, the largest first; `start` and `end` in seconds since 1970.
    Administrators see everybody's, others their own."""
    until = time.time() if end is None else min(end, time.time())
    async with context.database.read() as session:
        rows = await used(
            session, start=start, end=until, owner=principal.owner, by_job=group_by == "job", limit=limit + 1
        )
    price = context.settings.price_per_gpu_hour
    data = [
        UsageEntry(
            user=row.user,
            job=row.job,
            model=row.model,
            jobs=row.jobs,
            starts=row.starts,
            gpu_hours=row.gpu_hours,
            cpu_slot_hours=row.cpu_slot_hours,
            energy_joules=row.energy_joules,
            cost=cost_of(row.gpu_hours, price),
        )
        for row in rows[:limit]
    ]
    return UsageReport(
        start=start, end=until, group_by=group_by, price_per_gpu_hour=price, data=data, has_more=len(rows) > limit
    )
