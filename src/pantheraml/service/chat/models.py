"""Resolve the model of a chat request: a base model, or one that a job of the same user has made."""

from __future__ import annotations

from pantheraml.runs.supervised import SupervisedRun
from pantheraml.service.auth import Principal
from pantheraml.service.context import ServiceContext
from pantheraml.service.errors import ApiError, not_found
from pantheraml.service.schemas.fine_tuning import CHECKPOINT
from pantheraml.service.store.models import find_tuned
from pantheraml.specs.chat import ChatModel
from pantheraml.specs.train import MethodConfig, ModelConfig


async def chat_model(name: str, principal: Principal, context: ServiceContext) -> ChatModel:
    """ApiError if there is no such model, for this user."""
    bases = context.catalog.models()
    if name in bases:
        return ChatModel(model=ModelConfig(path=str(bases[name].path)))
    async with context.database.read() as session:
        job = await find_tuned(session, name, principal.owner)
    if job is None:
        err = not_found("model", name, param="model")
        if CHECKPOINT in name:
            err = ApiError(404, "Checkpoints are what a job continues from; they do not answer.", param="model")
        err.code = "model_not_found"
        raise err
    method = MethodConfig.model_validate(job.config["method"])
    model = ModelConfig.model_validate(job.config["model"])
    if job.model in bases:
        model = model.model_copy(update={"path": str(bases[job.model].path)})
    elif method.kind != "full":
        message = f"The base model of `{name}`, `{job.model}`, is no longer here."
        raise ApiError(400, message, param="model", code="base_model_gone")
    trained = SupervisedRun(context.settings.jobs.resolve() / job.id, job.id).run_dir.trained()
    return ChatModel(model=model, method=method, trained=trained)
