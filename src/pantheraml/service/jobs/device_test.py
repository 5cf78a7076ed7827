"""Test devices by an ordinary job that trains a tiny model on them for two steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.data.tiny_inputs import write_tiny_inputs
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.inventory import card_of
from pantheraml.service.jobs.states import State
from pantheraml.service.jobs.submit import Beside, require_gpus, submit
from pantheraml.service.jobs.text_files import add_text_file, remove_text_file
from pantheraml.service.schemas.fine_tuning import CreateJob
from pantheraml.service.schemas.multigpu import DeviceTest
from pantheraml.service.store.devices import disabled_devices
from pantheraml.service.store.jobs import leases
from pantheraml.service.store.tables import Event, Job
from pantheraml.specs.gpu_config import GPUConfig

STEPS = 2
SEQ_LEN = 64
MAX_SECONDS = 600.0
_KEPT_SECONDS = 3600.0
_STATUS = {State.SUCCEEDED: "passed", State.FAILED: "failed", State.CANCELLED: "cancelled"}


async def start_test(
    body: DeviceTest, principal: Principal, context: ServiceContext, record: Callable[[AsyncSession, str], None]
) -> Job:
    """Queue the test. ApiError if there are no such devices, or they are in use."""
    count = len(body.gpu_ids) or body.processes or 1
    await _require_free(body, count, context)
    model, data = await asyncio.to_thread(write_tiny_inputs, context.settings.cache.resolve() / "gpu-test")
    content = await asyncio.to_thread(data.read_bytes)
    kept_until = time.time() + _KEPT_SECONDS
    file = await add_text_file(context, principal.user, content, "gpu-test.jsonl", expires_at=kept_until)
    request = CreateJob.model_validate(
        {
            "model": "gpu-test",
            "training_file": file.id,
            "hyperparameters": {"n_epochs": 1, "batch_size": 2 * count},
            "pantheraml": {
                "mode": "distributed" if count > 1 else "auto",
                "processes": count,
                "max_runtime_seconds": MAX_SECONDS,
                "config": {"data": {"seq_len": SEQ_LEN, "on_long_row": "truncate"}, "train": {"max_steps": STEPS}},
            },
        }
    )
    gpus = GPUConfig(gpu_ids=body.gpu_ids, memory_fraction=1.0) if body.gpu_ids else None
    try:
        beside = Beside(gpus=gpus, model=model, is_test=True)
        return await submit(request, principal, context, idempotency_key=None, record=record, beside=beside)
    except BaseException:
        await remove_text_file(context, file)
        raise


async def _require_free(body: DeviceTest, count: int, context: ServiceContext) -> None:
    inventory = context.dispatcher.inventory
    require_gpus(body.gpu_ids, inventory.spec)
    if body.processes not in (None, count):
        message = f"{len(body.gpu_ids)} GPUs are named, but processes is {body.processes}."
        raise ApiError(400, message, param="processes")
    names = [f"gpu:{index}" for index in body.gpu_ids] or list(inventory.cards)
    if count > len(names):
        message = f"There are {len(names)} {inventory.kind}s, but processes is {count}."
        raise ApiError(400, message, param="processes", code="does_not_fit")
    async with context.database.read() as session:
        held = inventory.held(await leases(session))
        disabled = await disabled_devices(session)
    free = {card_of(name) for name in inventory.devices if name not in held} - {*disabled}
    if len(free.intersection(names)) < count:
        used = ", ".join(name for name in names if name not in free)
        raise ApiError(409, f"In use by jobs, or disabled: {used}.", param="gpu_ids", code="devices_in_use")


async def result_of_test(job: Job, context: ServiceContext) -> dict[str, Any]:
    """Return the result of the test, or its progress."""
    query = select(Event).where(Event.job_id == job.id, Event.kind == "train.step").order_by(Event.id.desc())
    async with context.database.read() as session:
        steps = (await session.scalars(query)).all()
    return {
        "status": _STATUS.get(State(job.state), job.state),
        "training_id": job.id,
        "device": job.device,
        "devices": job.leased,
        "processes": job.processes,
        "steps": len(steps),
        "loss": steps[0].data.get("train_loss") if steps else None,
        "tokens_per_second": steps[0].data.get("tokens_per_second") if steps else None,
        "seconds": job.seconds_run,
        "error": job.error,
    }
