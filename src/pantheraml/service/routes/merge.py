"""Have a tuned model written in one piece: artifacts `merged/...` of its job."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from pantheraml.client.answers import Merge
from pantheraml.service import audit
from pantheraml.service.auth import Reader, Submitter
from pantheraml.service.context import Context, ServiceContext
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.states import State
from pantheraml.service.routes.fine_tuning import existing_job
from pantheraml.service.store.tables import Job

router = APIRouter(prefix="/v1/fine_tuning/jobs/{job_id}/merge", tags=["jobs"])


async def _tuned(job_id: str, principal: Reader, context: Context) -> Job:
    job = await existing_job(context, principal, job_id, whole=True)
    if State(job.state) is not State.SUCCEEDED or job.fine_tuned_model is None or job.model_deleted_at is not None:
        raise ApiError(400, f"The job is {job.state} and has no model.", param="fine_tuning_job_id", code="no_model")
    if job.config["method"].get("kind") == "full":
        message = "The job trained every weight: its artifacts `model/...` are the whole model."
        raise ApiError(400, message, param="fine_tuning_job_id", code="no_adapter")
    return job


TunedJob = Annotated[Job, Depends(_tuned)]


@router.post("")
async def merge_model(
    principal: Submitter, job: TunedJob, request: Request, context: Context, wait: bool = False
) -> Merge:
    """Merge the adapter of a job into its base model, as artifacts `merged/...`. `wait=true` answers when that has
    ended. Who asks again learns how far it is, and begins anew what failed."""
    if context.merger.status(job.id)[0] in ("none", "failed"):
        await context.quota.require_some(job.owner)
        context.merger.start(job.id)
        async with context.database.write() as session:
            audit.record(session, principal, "model.merge", job.id, request)
    if wait:
        await context.merger.wait(job.id)
    return _shown(job, context)


@router.get("")
async def merge_status(job: TunedJob, context: Context) -> Merge:
    return _shown(job, context)


def _shown(job: Job, context: ServiceContext) -> Merge:
    status, error = context.merger.status(job.id)
    message = None if error is None else context.dispatcher.hide(f"{error.what} {error.fix or ''}".strip())
    return Merge(job=job.id, status=status, error=message)
