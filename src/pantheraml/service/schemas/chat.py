"""Requests and responses of chat completions, in OpenAI's form.

A field that would change the answer and is not supported is refused, not ignored.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pantheraml.service.ids import new_id


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    """Join text parts into one text."""
    if not isinstance(value, list):
        return value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("parts other than {'type': 'text', 'text': ...} are not supported here")
    return "".join(part["text"] for part in value)


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text)]
    # present in an earlier answer that is sent back as history
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, str]:
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class PlainFormat(_Body):
    type: Literal["text"]


class ChatCompletion(_Body):
    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """None: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=4), BeforeValidator(_as_list)
    ] = []
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    # accepted as long as they ask for nothing
    frequency_penalty: Literal[0, None] = None
    presence_penalty: Literal[0, None] = None
    logprobs: Literal[False, None] = None
    store: Literal[False, None] = None
    service_tier: Literal["auto", "default", None] = None
    top_logprobs: None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", None] = None
    parallel_tool_calls: bool | None = None
    response_format: PlainFormat | None = None
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatCompletion:
        if self.n not in (None, 1):
            raise ValueError("`n` must be 1 here: ask again for another answer")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream`")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` are the same setting, with different values")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ForwardedCompletion(BaseModel):
    """A request body that the operator's server validates."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(max_length=1024)]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    stream: bool | None = None


class Answer:
    """The answer to one request, whole or in chunks."""

    def __init__(self, model: str) -> None:
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def chunk(self, delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}


def usage_object(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
