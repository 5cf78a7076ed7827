"""The current state of this machine's GPUs, and which jobs hold them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sqlalchemy import select

from pantheraml.devices.sampler import GPUSampler, GPUSnapshot
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.store.tables import Job, Lease
from pantheraml.specs.plan import GPU


async def gpu_stats_now(context: ServiceContext, principal: Principal) -> dict[str, Any]:
    """Return memory, utilization and holder of each GPU. None: not reported by the driver. Jobs of other users are not
    named."""
    snapshots = await asyncio.to_thread(lambda: GPUSampler().take())
    async with context.database.read() as session:
        rows = await session.execute(select(Lease.resource, Job.id, Job.owner).join(Job, Job.id == Lease.job_id))
        held = {resource: job_id if principal.owner in (None, owner) else None for resource, job_id, owner in rows}
    gpus = context.dispatcher.inventory.spec.gpus
    info = [_described(gpu, now, held) for gpu, now in zip(gpus, snapshots, strict=True)]
    free = [gpu["gpu_id"] for gpu in info if not gpu["in_use"]]
    return {"gpu_count": len(info), "available_gpus": free, "gpu_info": info, "timestamp": time.time()}


def _described(gpu: GPU, now: GPUSnapshot, held: dict[str, str | None]) -> dict[str, Any]:
    used = None if now.total_bytes is None or now.free_bytes is None else now.total_bytes - now.free_bytes
    return {
        "gpu_id": gpu.index,
        "name": gpu.name,
        "compute_capability": gpu.compute_capability,
        "memory_total_bytes": now.total_bytes,
        "memory_used_bytes": used,
        "memory_utilization": None if used is None or not now.total_bytes else round(100 * used / now.total_bytes, 1),
        "gpu_utilization": now.utilization_percent,
        "temperature": now.temperature_celsius,
        "power": now.power_watts,
        "in_use": f"gpu:{gpu.index}" in held,
        "job": held.get(f"gpu:{gpu.index}"),
    }
