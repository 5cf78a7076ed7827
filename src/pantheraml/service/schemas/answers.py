"""Responses of OpenAI's API that our own client does not read, for the OpenAPI description."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from pantheraml.client.answers import File


class UploadAnswer(BaseModel):
    id: str
    object: Literal["upload"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"]
    file: File | None
    """The file of a completed upload."""


class UploadPartAnswer(BaseModel):
    id: str
    object: Literal["upload.part"]
    created_at: int
    upload_id: str


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None


class ChatUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatAnswer(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class EndpointAnswer(BaseModel):
    id: str
    object: Literal["webhook_endpoint"]
    created_at: int
    updated_at: int
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str


class NewEndpointAnswer(EndpointAnswer):
    signing_secret: str
    """Shown this once."""


class EndpointTestAnswer(BaseModel):
    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True]


class EventTypesAnswer(BaseModel):
    object: Literal["list"]
    data: list[str]
