"""The current state of this machine's GPUs, and which jobs hold them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from pantheraml.devices.sampler import GPUSampler, GPUSnapshot
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.jobs.inventory import card_of
from pantheraml.service.jobs.overview import holders_of_cards
from pantheraml.service.store.jobs import leases
from pantheraml.specs.plan import GPU
from pantheraml.specs.service_api import DeviceHolder


async def gpu_stats_now(context: ServiceContext, principal: Principal) -> dict[str, Any]:
    """Return memory, utilization and holders of each GPU. None: not reported by the driver. Jobs of other users are not
    named. GPUs are available as long as another job may start on them."""
    snapshots = await asyncio.to_thread(lambda: GPUSampler().take())
    async with context.database.read() as session:
        leased = await leases(session)
        held = await holders_of_cards(session, principal, leased)
    taken = context.dispatcher.inventory.held(leased)
    gpus = context.dispatcher.inventory.spec.gpus
    info = [_described(gpu, now, held.get(f"gpu:{gpu.index}", [])) for gpu, now in zip(gpus, snapshots, strict=True)]
    free = {card_of(name) for name in context.dispatcher.inventory.devices if name not in taken}
    available = [gpu.index for gpu in gpus if f"gpu:{gpu.index}" in free]
    return {"gpu_count": len(info), "available_gpus": available, "gpu_info": info, "timestamp": time.time()}


def _described(gpu: GPU, now: GPUSnapshot, holders: Sequence[DeviceHolder]) -> dict[str, Any]:
    jobs = [each.job for each in holders if each.job is not None]
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
        "in_use": bool(holders),
        "job": jobs[0] if jobs else None,
        "jobs": jobs,
    }
