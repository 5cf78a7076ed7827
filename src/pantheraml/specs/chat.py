"""Messages between the service and its chat worker: one JSON object per line, over the worker's stdin and stdout.

The worker answers requests one after another. For each it sends `ChatLoaded`, then `ChatText` as the text comes, and at
the end `ChatDone` or `ChatFailed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from pantheraml.specs.train import MethodConfig, ModelConfig

FinishReason = Literal["stop", "length", "cancelled"]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: int
    """Id of the request."""


class ChatModel(BaseModel):
    """A base model, perhaps with the weights that a run trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelConfig
    method: MethodConfig = MethodConfig()
    trained: Path | None = None
    """Folder of the trained weights; None: the base model."""


class PromptRow(BaseModel):
    """A row of training data, without what the model is to write."""

    model_config = ConfigDict(extra="forbid")

    format: str
    row: dict[str, Any]


class ChatRequest(_Message):
    kind: Literal["chat"] = "chat"
    model: ChatModel
    messages: list[dict[str, str]] = []
    """With `role` and `content`."""
    prompt_row: PromptRow | None = None
    """Continued instead of the messages, with the very tokens that come before its answer in training."""
    max_tokens: int | None
    """None: as many as the model has positions, at most `default_tokens`."""
    default_tokens: int
    temperature: float
    top_p: float
    stop: list[str]
    seed: int | None


class ChatCancel(_Message):
    """Stop answering this request; it ends with `ChatDone`."""

    kind: Literal["cancel"] = "cancel"


class ChatLoaded(_Message):
    """The model is in memory."""

    kind: Literal["loaded"] = "loaded"


class ChatText(_Message):
    kind: Literal["text"] = "text"
    text: str


class ChatDone(_Message):
    kind: Literal["done"] = "done"
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int


class ChatFailed(_Message):
    kind: Literal["failed"] = "failed"
    error: str
    """Class name (`base.errors`)."""
    what: str
    fix: str | None
    unexpected: bool = False
    """True if the request is not at fault."""


ChatReply = ChatLoaded | ChatText | ChatDone | ChatFailed
CHAT_INPUT: TypeAdapter[ChatRequest | ChatCancel] = TypeAdapter(
    Annotated[ChatRequest | ChatCancel, Field(discriminator="kind")]
)
CHAT_REPLY: TypeAdapter[ChatReply] = TypeAdapter(Annotated[ChatReply, Field(discriminator="kind")])
