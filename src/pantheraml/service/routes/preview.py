"""Preview what a job would train on before it is submitted."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from pantheraml.base.errors import PantheraError
from pantheraml.service.auth import Submitter
from pantheraml.service.context import Context
from pantheraml.service.errors import ApiError, refusal
from pantheraml.service.jobs.configure import default_seq_len
from pantheraml.service.jobs.submit import training_data
from pantheraml.service.schemas.fine_tuning import FileId
from pantheraml.service.store.files import content_of

router = APIRouter(prefix="/v1/fine_tuning", tags=["fine-tuning"])


class PreviewBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=512)]
    training_file: FileId
    seq_len: Annotated[int, Field(ge=8, le=1 << 21)] | None = None
    rows: Annotated[int, Field(ge=1, le=20)] = 3


@router.post("/preview")
async def preview_tokens(body: PreviewBody, principal: Submitter, context: Context) -> dict[str, Any]:
    """Tokens of the first rows of a file, as the model is given them, and which of them it is trained on."""
    base = context.catalog.models().get(body.model)
    if base is None:
        raise ApiError(400, f"There is no model `{body.model[:100]}`.", param="model", code="model_not_found")
    file = await training_data(body.training_file, "training_file", principal, context)
    path = content_of(file, context.settings.files.resolve())
    seq_len = body.seq_len or default_seq_len(base.path)
    try:
        found = await context.previewer.preview(base.path, path, file.format or "", seq_len, body.rows)
    except PantheraError as err:
        refused = refusal(err)
        raise ApiError(400, context.dispatcher.hide(refused.message), code=refused.code) from err
    return {"object": "fine_tuning.preview", "format": file.format, "seq_len": seq_len, **found}
