"""OpenAI's chat completions, to try a base model or a tuned one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pantheraml.service.auth import Submitter
from pantheraml.service.chat.models import chat_model
from pantheraml.service.chat.queue import Reply
from pantheraml.service.context import Context
from pantheraml.service.errors import ApiError, error_object
from pantheraml.service.schemas.chat import Answer, ChatCompletion, ForwardedCompletion, usage_object
from pantheraml.specs.chat import ChatDone, ChatRequest, ChatText

router = APIRouter(prefix="/v1/chat", tags=["chat"])
forwarding = APIRouter(prefix="/v1/chat", tags=["chat"])
"""Replaces `router` in a service with `--inference-url`."""

DEFAULT_TOKENS = 2048
"""Default limit on the tokens of an answer."""


@router.post("/completions")
async def create_chat_completion(
    body: ChatCompletion, request: Request, principal: Submitter, context: Context
) -> Response:
    """Answer with a base model or one of your tuned models, whole or, with `stream`, as server-sent events."""
    model = await chat_model(body.model, principal, context)
    ticket = context.chat.submit(
        ChatRequest(
            id=context.chat.next_number(),
            model=model,
            messages=[message.for_template() for message in body.messages],
            max_tokens=body.most_tokens,
            default_tokens=DEFAULT_TOKENS,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            stop=body.stop,
            seed=body.seed,
        )
    )
    context.chat.watch(ticket, request.is_disconnected)
    replies = ticket.replies()
    answer = Answer(body.model)
    try:
        if not body.stream:
            return JSONResponse(await _whole(answer, replies))
        first = await anext(replies)  # a refusal is an answer of its own, not the beginning of a stream
    except asyncio.CancelledError:
        context.chat.cancel(ticket)
        raise
    return StreamingResponse(_events(answer, first, replies, body.include_usage), media_type="text/event-stream")


@forwarding.post("/completions")
async def forward_chat_completion(
    body: ForwardedCompletion, request: Request, principal: Submitter, context: Context
) -> Response:
    """Answer with a base model or one of your tuned models, as the operator's inference server does."""
    await chat_model(body.model, principal, context)
    assert context.forwarder is not None
    return await context.forwarder.answer(body.model_dump(exclude_unset=True), request.is_disconnected)


async def _whole(answer: Answer, replies: AsyncIterator[Reply]) -> dict[str, Any]:
    text: list[str] = []
    async for reply in replies:
        if isinstance(reply, ChatDone):
            usage = usage_object(reply.prompt_tokens, reply.completion_tokens)
            return answer.whole("".join(text), reply.finish_reason, usage)
        text.append(reply.text)
    raise AssertionError("an answer ends with ChatDone")


async def _events(
    answer: Answer, first: Reply, replies: AsyncIterator[Reply], include_usage: bool
) -> AsyncIterator[str]:
    usage = {"usage": None} if include_usage else {}
    yield _event({**answer.chunk({"role": "assistant", "content": ""}), **usage})
    try:
        async for reply in _joined(first, replies):
            if isinstance(reply, ChatText):
                yield _event({**answer.chunk({"content": reply.text}), **usage})
            else:
                yield _event({**answer.chunk({}, reply.finish_reason), **usage})
                if include_usage:
                    yield _event(answer.usage_chunk(usage_object(reply.prompt_tokens, reply.completion_tokens)))
    except ApiError as err:  # the status has been sent: clients raise on an `error` in the stream
        yield _event(error_object(err.status, err.message, code=err.code))
        return
    yield "data: [DONE]\n\n"


async def _joined(first: Reply, replies: AsyncIterator[Reply]) -> AsyncIterator[Reply]:
    yield first
    async for reply in replies:
        yield reply


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
