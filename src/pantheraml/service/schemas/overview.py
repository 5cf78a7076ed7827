"""Request bodies of the endpoints that concern the whole service; responses are in `specs.service_api`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class MoveJob(BaseModel):
    model_config = ConfigDict(extra="forbid")

    job: Annotated[str, Field(max_length=64)]
    before: Annotated[str, Field(max_length=64)] | None = None
    """None: to the end of the queue."""
