"""Train on texts instead of an uploaded file: for `/multigpu` and `FineTuningService`."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.errors import ApiError, invalid_values
from pantheraml.service.jobs.configure import LEARNING_RATE
from pantheraml.service.jobs.states import ENDED, State
from pantheraml.service.jobs.submit import Beside, submit
from pantheraml.service.jobs.text_files import add_text_file, remove_text_file
from pantheraml.service.schemas.fine_tuning import CreateJob
from pantheraml.service.schemas.multigpu import TrainingConfig, TrainingRequest, TrainingType
from pantheraml.service.store.devices import settings_of
from pantheraml.service.store.tables import Job
from pantheraml.specs.gpu_config import GPUConfig

_LOOK_AGAIN_SECONDS = 15.0


async def start_training(
    kind: TrainingType,
    body: TrainingRequest,
    principal: Principal,
    context: ServiceContext,
    record: Callable[[AsyncSession, str], None],
) -> Job:
    """Queue the training. ApiError if it cannot run; nothing remains of it then."""
    async with context.database.read() as session:
        row = await settings_of(session, principal.user)
    gpus = None if row.gpus is None else GPUConfig(**row.gpus)
    training = _with_defaults(body.training_config, gpus, row.training or {})
    rows = "".join(json.dumps({"text": text}) + "\n" for text in body.dataset_config.texts)
    file = await add_text_file(context, principal.user, rows.encode(), f"texts-{secrets.token_hex(4)}.jsonl")
    try:
        request = _as_job(kind, body, training, gpus, file.id, context)
        return await submit(request, principal, context, idempotency_key=None, record=record, beside=Beside(gpus=gpus))
    except BaseException as err:
        await remove_text_file(context, file)
        if isinstance(err, ValidationError):  # each value is valid, but not their combination
            raise invalid_values(err) from err
        raise


def check_batch_size(gpus: GPUConfig) -> None:
    """ApiError unless trainings may have it: what is stored holds for all later ones."""
    try:
        TrainingConfig(batch_size_per_gpu=gpus.batch_size_per_gpu)
    except ValidationError as err:
        raise invalid_values(err) from err


def _with_defaults(given: TrainingConfig, gpus: GPUConfig | None, stored: dict[str, Any]) -> TrainingConfig:
    """Return the settings of the request, filled up with those that its user has stored, then with the defaults."""
    of_gpus = {} if gpus is None else {"batch_size_per_gpu": gpus.batch_size_per_gpu}
    return TrainingConfig.model_validate({**of_gpus, **stored, **given.model_dump(exclude_unset=True)})


def _as_job(
    kind: TrainingType,
    body: TrainingRequest,
    training: TrainingConfig,
    gpus: GPUConfig | None,
    file_id: str,
    context: ServiceContext,
) -> CreateJob:
    if kind == "auto" and gpus is not None and gpus.distributed_training and gpus.use_multi_gpu:
        kind = "distributed"
    world_size = _world_size(kind, training, gpus, context)
    settings: dict[str, Any] = {"data": {"seq_len": body.dataset_config.max_length}}
    batch_size = training.batch_size_per_gpu * world_size
    if gpus is not None:
        fields = {"batch_size_per_gpu": training.batch_size_per_gpu}
        chosen = gpus.model_copy(update=fields).to_train_settings(world_size)
        batch_size = chosen["train.global_batch_size"]
        settings["train"] = {"micro_batch_size": chosen["train.micro_batch_size"]}
        settings["model"] = {"precision": chosen["model.precision"]}
    return CreateJob.model_validate(
        {
            "model": body.model_name,
            "training_file": file_id,
            "hyperparameters": {
                "n_epochs": training.epochs,
                "batch_size": batch_size,
                "learning_rate_multiplier": training.learning_rate / LEARNING_RATE,
            },
            "metadata": None if body.user_id is None else {"user_id": str(body.user_id)[:512]},
            "pantheraml": {"mode": kind, "processes": world_size, "config": settings},
        }
    )


def _world_size(kind: TrainingType, training: TrainingConfig, gpus: GPUConfig | None, context: ServiceContext) -> int:
    """Number of GPUs, or of CPU processes."""
    if gpus is not None and not gpus.use_multi_gpu:
        if kind != "auto" or training.world_size not in (None, 1):
            message = "use_multi_gpu is false in your configuration (POST /multigpu/config): only one device is used."
            raise ApiError(400, message, param="use_multi_gpu")
        return 1
    here = len(context.dispatcher.inventory.spec.gpus)
    return training.world_size or (len(gpus.gpu_ids) if gpus else 0) or here or (2 if kind == "distributed" else 1)


async def ended(job: Job, context: ServiceContext) -> Job:
    """Wait for the job to end, or the service to shut down; return the job."""
    current = job
    while not context.notifier.closed:
        with context.notifier.listening(job.id) as news:
            async with context.database.read() as session:
                current = await session.get_one(Job, job.id)
            if State(current.state) in ENDED:
                break
            try:
                async with asyncio.timeout(_LOOK_AGAIN_SECONDS):
                    await news.wait()
            except TimeoutError:
                continue
    return current


def training_object(job: Job) -> dict[str, Any]:
    """A job as `/multigpu` shows it."""
    return {
        "training_id": job.id,
        "status": job.state,
        "training_type": job.config["parallel"]["mode"],
        "model_name": job.model,
        "user_id": job.owner,
        "fine_tuned_model": job.fine_tuned_model,
        "result_files": job.result_files,
        "devices": job.processes,
        "device": job.device,
        "leased": job.leased,
        "hyperparameters": job.hyperparameters,
        "trained_tokens": job.trained_tokens,
        "seconds": job.seconds_run,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "error": job.error,
    }
