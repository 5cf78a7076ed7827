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
from pantheraml.service.errors import invalid_values
from pantheraml.service.jobs.configure import LEARNING_RATE
from pantheraml.service.jobs.states import ENDED, State
from pantheraml.service.jobs.submit import submit
from pantheraml.service.jobs.text_files import add_text_file, remove_text_file
from pantheraml.service.schemas.fine_tuning import CreateJob
from pantheraml.service.schemas.multigpu import TrainingRequest, TrainingType
from pantheraml.service.store.tables import Job

_LOOK_AGAIN_SECONDS = 15.0


async def start_training(
    kind: TrainingType,
    body: TrainingRequest,
    principal: Principal,
    context: ServiceContext,
    record: Callable[[AsyncSession, str], None],
) -> Job:
    """Queue the training. ApiError if it cannot run; nothing is left of it then."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in body.dataset_config.texts)
    file = await add_text_file(context, principal.user, rows.encode(), f"texts-{secrets.token_hex(4)}.jsonl")
    try:
        request = _as_job(kind, body, file.id, context)
        return await submit(request, principal, context, idempotency_key=None, record=record)
    except BaseException as err:
        await remove_text_file(context, file)
        if isinstance(err, ValidationError):  # each value is allowed, but not what they make together
            raise invalid_values(err) from err
        raise


def _as_job(kind: TrainingType, body: TrainingRequest, file_id: str, context: ServiceContext) -> CreateJob:
    training, gpus = body.training_config, len(context.dispatcher.inventory.spec.gpus)
    world_size = training.world_size or gpus or (2 if kind == "distributed" else 1)
    return CreateJob.model_validate(
        {
            "model": body.model_name,
            "training_file": file_id,
            "hyperparameters": {
                "n_epochs": training.epochs,
                "batch_size": training.batch_size_per_gpu * world_size,
                "learning_rate_multiplier": training.learning_rate / LEARNING_RATE,
            },
            "metadata": None if body.user_id is None else {"user_id": str(body.user_id)[:512]},
            "pantheraml": {
                "mode": kind,
                "processes": world_size,
                "config": {"data": {"seq_len": body.dataset_config.max_length}},
            },
        }
    )


async def ended(job: Job, context: ServiceContext) -> Job:
    """The job, when it has ended, or the service is about to."""
    current = job
    while not context.notifier.closed:
        with context.notifier.listening(job.id) as news:
            async with context.database.read() as session:
                current = await session.get_one(Job, job.id)
            if State(current.state) in ENDED:
                break
            try:
                await asyncio.wait_for(news.wait(), _LOOK_AGAIN_SECONDS)
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
        "hyperparameters": job.hyperparameters,
        "trained_tokens": job.trained_tokens,
        "seconds": job.seconds_run,
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "error": job.error,
    }
