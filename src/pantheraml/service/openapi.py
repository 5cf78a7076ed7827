"""The OpenAPI description at `/openapi.json`: responses, errors among them, keys, and examples.

Routes of OpenAI's API build their responses by hand; here they are described by the models with which our client reads
them, so that one test checks the service, the description and the client against each other.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from pantheraml.client.answers import Artifact, File, Job, JobEvent, JobPlan, Model, Page, Series
from pantheraml.service.schemas.answers import (
    ChatAnswer,
    EndpointAnswer,
    EndpointTestAnswer,
    EventTypesAnswer,
    NewEndpointAnswer,
    UploadAnswer,
    UploadPartAnswer,
)
from pantheraml.service.schemas.examples import EXAMPLES
from pantheraml.specs.plan import Plan


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every error, in OpenAI's form."""

    error: ErrorDetail


class Deleted(BaseModel):
    id: str
    object: str
    deleted: bool


class StreamEnd(BaseModel):
    """Data of the last event of a job's stream."""

    state: str


_FILES, _JOBS, _JOB = "/v1/files", "/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs/{job_id}"
_PARTS, _CHAT = "/v1/uploads/{upload_id}/parts", "/v1/chat/completions"
_HOOKS, _HOOK = "/v1/webhook_endpoints", "/v1/webhook_endpoints/{endpoint_id}"
_ANSWERS: dict[tuple[str, str], type[BaseModel] | tuple[type[BaseModel], ...]] = {
    ("post", _FILES): File,
    ("get", _FILES): Page[File],
    ("get", f"{_FILES}/{{file_id}}"): File,
    ("delete", f"{_FILES}/{{file_id}}"): Deleted,
    ("post", _JOBS): (Job, JobPlan),
    ("get", _JOBS): Page[Job],
    ("get", _JOB): Job,
    **{("post", f"{_JOB}/{action}"): Job for action in ("cancel", "pause", "resume")},
    ("get", f"{_JOB}/events"): Page[JobEvent],
    ("get", f"{_JOB}/series"): Series,
    ("get", f"{_JOB}/artifacts"): Page[Artifact],
    ("get", f"{_JOB}/plan"): Plan,
    ("delete", f"{_JOB}/checkpoints"): Deleted,
    ("get", "/v1/models/{name}"): Model,
    ("delete", "/v1/models/{name}"): Deleted,
    ("post", "/v1/uploads"): UploadAnswer,
    ("post", _PARTS): UploadPartAnswer,
    **{("post", f"/v1/uploads/{{upload_id}}/{action}"): UploadAnswer for action in ("complete", "cancel")},
    ("post", _CHAT): ChatAnswer,
    ("get", "/v1/webhook_event_types"): EventTypesAnswer,
    ("post", _HOOKS): NewEndpointAnswer,
    ("get", _HOOKS): Page[EndpointAnswer],
    ("get", _HOOK): EndpointAnswer,
    ("post", _HOOK): EndpointAnswer,
    ("delete", _HOOK): Deleted,
    ("post", f"{_HOOK}/rotate_secret"): NewEndpointAnswer,
    ("post", f"{_HOOK}/test"): EndpointTestAnswer,
}
_BYTES = {
    f"{_FILES}/{{file_id}}/content": "application/octet-stream",
    f"{_JOB}/logs": "text/plain",
    f"{_JOB}/artifacts/{{name}}": "application/octet-stream",
}
"""Responses with content, whole or a range of it."""
_OPEN = frozenset({"/healthz", "/readyz"})
_REFERENCE = "#/components/schemas/{model}"
_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["fine-tune", "user_data"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                },
            }
        }
    },
}
_PART = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string", "format": "binary"}},
            }
        }
    },
}


class DescribedAPI(FastAPI):
    """A FastAPI application whose description includes its responses."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = described(super().openapi())
        return self.openapi_schema


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """Complete FastAPI's own description, in place."""
    models: dict[type[BaseModel], None] = {Error: None, StreamEnd: None}
    for answer in _ANSWERS.values():
        models.update(dict.fromkeys(answer if isinstance(answer, tuple) else (answer,)))
    _, definitions = models_json_schema([(each, "serialization") for each in models], ref_template=_REFERENCE)
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    components["responses"] = {
        "Error": {"description": "It was refused.", "content": {"application/json": {"schema": _reference(Error)}}}
    }
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            _complete(path, method, operation)
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    return schema


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)  # FastAPI's own form of errors, which is not ours
    answers["default"] = {"$ref": "#/components/responses/Error"}
    if path not in _OPEN:
        operation["security"] = [{}, {"key": []}]  # without keys, the service takes none
    answer = _ANSWERS.get((method, path))
    if answer is not None:
        schema = _reference(answer) if isinstance(answer, type) else {"anyOf": [_reference(each) for each in answer]}
        answers["200"]["content"] = {"application/json": {"schema": schema}}
    if path in _BYTES:
        content = {_BYTES[path]: {"schema": {"type": "string", "format": "binary"}}}
        answers["200"]["content"] = content
        answers["206"] = {"description": "The requested range.", "content": content}
        answers["416"] = {"$ref": "#/components/responses/Error"}
    if (method, path) == ("post", _FILES):
        operation["requestBody"] = _UPLOAD
    if (method, path) == ("post", _PARTS):
        operation["requestBody"] = _PART
    if (method, path) == ("post", _CHAT):
        answers["200"]["content"]["text/event-stream"] = {"itemSchema": _server_sent({"type": "string"}, "data")}
    if (method, path) == ("get", f"{_JOB}/stream"):
        told = {"anyOf": [_reference(JobEvent), _reference(StreamEnd)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": told}
        answers["200"]["content"] = {"text/event-stream": {"itemSchema": _server_sent(data, "data", "event")}}
    if method == "post" and path in EXAMPLES:
        operation["requestBody"]["content"]["application/json"]["examples"] = {"example": {"value": EXAMPLES[path]}}


def _server_sent(data: dict[str, Any], *required: str) -> dict[str, Any]:
    """Return the schema of each server-sent event of a stream, as FastAPI writes it."""
    text = {"type": "string"}
    return {"type": "object", "required": [*required], "properties": {"id": text, "event": text, "data": data}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    """Return a reference to the schema, by pydantic's name for it."""
    name = model.__name__.replace("[", "_").replace("]", "_")
    return {"$ref": _REFERENCE.format(model=name)}
