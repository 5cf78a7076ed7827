"""Accept a request for a job: resolve its ids, plan it, and queue or refuse it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.base.errors import OutOfMemoryError, PantheraError
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.errors import ApiError, refusal
from pantheraml.service.ids import new_id
from pantheraml.service.jobs.configure import Inputs, PlannedJob, configure
from pantheraml.service.jobs.inventory import LeasableDevices
from pantheraml.service.jobs.states import ENDED, State
from pantheraml.service.schemas.fine_tuning import CreateJob
from pantheraml.service.store.files import content_of, find_file
from pantheraml.service.store.jobs import add_job, count_jobs, move
from pantheraml.service.store.tables import File, Job
from pantheraml.specs.gpu_config import GPUConfig
from pantheraml.specs.plan import DeviceSpec


@dataclass(frozen=True)
class Beside:
    """Settings of a job from `/multigpu`, beyond those of OpenAI's API."""

    gpus: GPUConfig | None = None
    model: Path | None = None
    """Folder of a model that is not in the catalog."""
    is_test: bool = False


async def plan_job(
    body: CreateJob, principal: Principal, context: ServiceContext, seed: int, beside: Beside | None = None
) -> PlannedJob:
    """Resolve the request on this machine. ApiError with the parameter at fault if it cannot run."""
    beside = beside or Beside()
    if body.pantheraml.priority > 0 and not principal.allows("admin"):
        raise ApiError(403, "A priority above 0 needs the scope `admin`.", param="pantheraml.priority")
    base = beside.model or _folder_of(body.model, context)
    training = await training_data(body.training_file, "training_file", principal, context)
    files = context.settings.files.resolve()
    validation = None
    if body.validation_file is not None:
        validation = content_of(await training_data(body.validation_file, "validation_file", principal, context), files)
    inputs = Inputs(base, content_of(training, files), training.rows or 0, validation)
    inventory = context.dispatcher.inventory
    devices = _devices_for(beside, inventory, body.pantheraml.processes or 1)
    _require_devices(body.pantheraml.processes or 1, devices, inventory)
    try:
        planned = await asyncio.to_thread(
            configure,
            body,
            inputs,
            seed,
            devices,
            beside.gpus,
            jobs_per_gpu=inventory.jobs_per_gpu,
            memory_fraction=inventory.memory_fraction,
            cpu_slots=len(inventory.cards),
        )
    except PantheraError as err:
        refused = refusal(err)
        code, message = refused.code, context.dispatcher.hide(refused.message)
        if isinstance(err, OutOfMemoryError):
            code = "does_not_fit"
            if inventory.jobs_per_gpu > 1:
                message += f" {inventory.jobs_per_gpu} jobs share each GPU here, and its memory."
        raise ApiError(400, message, code=code) from err
    _require_devices(planned.devices, devices, inventory)
    return planned


def _require_devices(count: int, devices: DeviceSpec, inventory: LeasableDevices) -> None:
    """ApiError if there are fewer GPUs, or CPU slots."""
    available = len(devices.gpus) or len(inventory.devices)
    if count > available:
        message = f"It needs {count} {inventory.kind}s, but there are {available}."
        raise ApiError(400, message, param="pantheraml.processes", code="does_not_fit")


def _folder_of(name: str, context: ServiceContext) -> Path:
    models = context.catalog.models()
    if name not in models:
        known = ", ".join(sorted(models)[:20]) or "none"
        message = f"The model `{name[:100]}` is not one that can be fine-tuned here: {known}."
        raise ApiError(400, message, param="model", code="model_not_found")
    return models[name].path


def _devices_for(beside: Beside, inventory: LeasableDevices, processes: int) -> DeviceSpec:
    """This machine, with the GPUs that the job may have, or the cores of its CPU slots."""
    wanted = [] if beside.gpus is None else beside.gpus.gpu_ids
    spec = inventory.spec
    require_gpus(wanted, spec)
    if not spec.gpus:
        slots = [f"cpu:{slot}" for slot in range(min(processes, len(inventory.devices)))]
        return spec.model_copy(update={"cpu_count": len(inventory.cores_of(slots, range(spec.cpu_count)) or ())})
    return spec.model_copy(update={"gpus": tuple(gpu for gpu in spec.gpus if not wanted or gpu.index in wanted)})


def require_gpus(indices: Sequence[int], spec: DeviceSpec) -> None:
    """ApiError if there is no such GPU."""
    missing = sorted(set(indices) - {gpu.index for gpu in spec.gpus})
    if missing:
        known = spec.note or f"there are {', '.join(str(gpu.index) for gpu in spec.gpus)}"
        raise ApiError(400, f"There is no GPU {missing[0]}: {known}.", param="gpu_ids", code="gpu_not_found")


async def training_data(file_id: str, param: str, principal: Principal, context: ServiceContext) -> File:
    async with context.database.read() as session:
        file = await find_file(session, file_id, principal.owner)
    if file is None:
        raise ApiError(400, f"No such file: {file_id}", param=param, code="file_not_found")
    if file.format is None:
        raise ApiError(400, f"{file_id} was not uploaded with the purpose `fine-tune`.", param=param)
    return file


def random_seed() -> int:
    return secrets.randbelow(1 << 31)


async def submit(
    body: CreateJob,
    principal: Principal,
    context: ServiceContext,
    *,
    idempotency_key: str | None,
    record: Callable[[AsyncSession, str], None],
    beside: Beside | None = None,
) -> Job:
    """Queue a job, or return the one that an earlier request with this idempotency key made."""
    if idempotency_key is not None and (earlier := await _earlier(principal, idempotency_key, context)) is not None:
        return earlier
    await context.quota.require_some(principal.user)
    seed = random_seed() if body.seed is None else body.seed
    planned = await plan_job(body, principal, context, seed, beside)
    job = _row(body, principal, planned, seed, idempotency_key)
    if beside is not None:
        job.is_test = beside.is_test
        job.gpu_ids = (beside.gpus and beside.gpus.gpu_ids) or None
    try:
        await _queue(job, body, principal, context, record)
    except IntegrityError:
        # the same key came a moment before, in a transaction that was not over
        if idempotency_key is None or (earlier := await _earlier(principal, idempotency_key, context)) is None:
            raise
        return earlier
    context.dispatcher.wake()
    return job


async def _queue(
    job: Job,
    body: CreateJob,
    principal: Principal,
    context: ServiceContext,
    record: Callable[[AsyncSession, str], None],
) -> None:
    """Add the job; IntegrityError if there is one of its idempotency key."""
    async with context.database.write() as session:
        await add_job(session, job)
        unfinished = [state for state in State if state not in ENDED]
        if await count_jobs(session, principal.user, unfinished) > context.settings.max_queued_per_user:
            message = f"You have {context.settings.max_queued_per_user} unfinished jobs, as many as are allowed."
            raise ApiError(403, message, code="quota_exceeded")
        record(session, job.id)
        await move(session, job, State.QUEUED, "Files validated, job queued", queued_at=time.time())
        if body.pantheraml.hold:
            await move(session, job, State.PAUSED, "Submitted on hold")


async def _earlier(principal: Principal, key: str, context: ServiceContext) -> Job | None:
    query = select(Job).where(Job.owner == principal.user, Job.idempotency_key == key)
    async with context.database.read() as session:
        return await session.scalar(query)


def _row(body: CreateJob, principal: Principal, planned: PlannedJob, seed: int, idempotency_key: str | None) -> Job:
    return Job(
        id=new_id("ftjob"),
        owner=principal.user,
        model=body.model,
        training_file=body.training_file,
        validation_file=body.validation_file,
        suffix=body.suffix,
        seed=seed,
        user_metadata=body.metadata,
        hyperparameters=planned.hyperparameters,
        config=planned.config,
        plan=planned.plan.model_dump(mode="json"),
        predicted_seconds=planned.predicted_seconds,
        processes=planned.devices,
        device=planned.plan.device,
        priority=body.pantheraml.priority,
        max_runtime=body.pantheraml.max_runtime_seconds,
        idempotency_key=idempotency_key,
        created_at=time.time(),
        result_files=[],
    )
