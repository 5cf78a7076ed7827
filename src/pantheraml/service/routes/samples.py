"""Generations before and after a fine-tuning."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from pantheraml.service.auth import Submitter
from pantheraml.service.chat.models import chat_model
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.samples import complete, first_samples, read_samples, write_samples
from pantheraml.service.routes.fine_tuning import existing_job
from pantheraml.service.routes.jobs import ReadableJob
from pantheraml.service.store.files import content_of, find_file
from pantheraml.service.store.tables import File, Job

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}", tags=["jobs"])


class SamplesBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rows: Annotated[int, Field(ge=1, le=10)] = 4
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 128


@router.get("/samples")
async def job_samples(job: ReadableJob, context: Context) -> dict[str, Any]:
    """The answers that `POST` has made last, if it has."""
    found = await asyncio.to_thread(read_samples, context.settings.jobs / job.id)
    return found or _answer(job, None, [])


@router.post("/samples", responses={400: {"description": "The job has made no model, or its data is deleted."}})
async def make_samples(
    job_id: str, body: SamplesBody, request: Request, principal: Submitter, context: Context
) -> dict[str, Any]:
    """Continue the prompts of the first rows of its evaluation data (without any, of its training data), by the base
    model and by the one that the job has made: always the likeliest token, and the tokens of the prompt as in training.
    """
    job = await existing_job(context, principal, job_id)
    if job.fine_tuned_model is None:
        raise ApiError(400, "The job has made no model (yet).", code="no_model")
    if context.forwarder is not None:
        raise ApiError(400, "An inference server of the operator's answers chat here; ask it.", code="no_chat_worker")
    models = [await chat_model(name, principal, context) for name in (job.model, job.fine_tuned_model)]
    file = await _data(job, context)
    path, format = content_of(file, context.settings.files.resolve()), file.format or ""
    samples = await asyncio.to_thread(first_samples, path, format, body.rows)
    before, after = [
        await complete(samples, format, model, context.chat, body.max_tokens, request.is_disconnected)
        for model in models
    ]
    rows = [
        {"line": each.line, "prompt": each.prompt, "expected": each.expected, "before": one, "after": other}
        for each, one, other in zip(samples, before, after, strict=True)
    ]
    found = _answer(job, file, rows)
    await asyncio.to_thread(write_samples, context.settings.jobs / job.id, found)
    return found


def _answer(job: Job, file: File | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "object": "fine_tuning.samples",
        "created_at": None if file is None else int(time.time()),
        "file": None if file is None else file.id,
        "filename": None if file is None else file.filename,
        "trained_on": file is not None and file.id == job.training_file,
        "data": rows,
    }


async def _data(job: Job, context: ServiceContext) -> File:
    async with context.database.read() as session:
        for name in (job.validation_file, job.training_file):
            file = None if name is None else await find_file(session, name, None)
            if file is not None and file.format is not None:
                return file
    raise ApiError(400, "The data of the job is deleted.", code="file_not_found")
