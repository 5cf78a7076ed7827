"""The queue of chat requests: its limit, and waiting requests at shutdown."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from pantheraml.service.chat.queue import ChatQueue
from pantheraml.service.errors import ApiError
from pantheraml.service.jobs.dispatcher import Dispatcher
from pantheraml.service.settings import Settings
from pantheraml.specs.chat import ChatDone, ChatModel, ChatRequest, ChatText
from pantheraml.specs.train import ModelConfig


def request(number: int) -> ChatRequest:
    settings: dict[str, Any] = {"max_tokens": 1, "default_tokens": 1, "temperature": 0, "top_p": 1, "stop": []}
    model = ChatModel(model=ModelConfig(path="m"))
    return ChatRequest(id=number, model=model, messages=[], seed=None, **settings)


def idle_queue(tmp_path: Path, waiting: int) -> ChatQueue:
    """A queue without a worker."""
    return ChatQueue(Settings(tmp_path, tmp_path, chat_max_waiting=waiting), cast(Dispatcher, None))


def test_too_many_are_told_when_to_come_back(tmp_path: Path) -> None:
    async def check() -> None:
        queue = idle_queue(tmp_path, 3)
        for number in range(3):
            queue.submit(request(number))
        with pytest.raises(ApiError, match="3 chat requests wait already") as caught:
            queue.submit(request(4))
        assert (caught.value.status, caught.value.code) == (429, "chat_queue_full")
        assert caught.value.headers["retry-after"] == "15"

    anyio.run(check)


def test_who_waits_is_told_that_the_service_ends(tmp_path: Path) -> None:
    async def check() -> None:
        queue = idle_queue(tmp_path, 3)
        ticket = queue.submit(request(1))
        queue.close()
        with pytest.raises(ApiError, match="shutting down"):
            await anext(ticket.replies())
        with pytest.raises(ApiError, match="shutting down"):
            queue.submit(request(2))

    anyio.run(check)


def test_an_answer_ends_once(tmp_path: Path) -> None:
    async def check() -> None:
        ticket = idle_queue(tmp_path, 1).submit(request(1))
        done = ChatDone(id=1, finish_reason="stop", prompt_tokens=1, completion_tokens=1)
        for reply in (ChatText(id=1, text="a"), done, ApiError(500, "late")):
            ticket.tell(reply)
        assert [type(reply).__name__ async for reply in ticket.replies()] == ["ChatText", "ChatDone"]

    anyio.run(check)
