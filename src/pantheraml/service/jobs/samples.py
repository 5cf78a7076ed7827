"""Generations before and after a fine-tuning, for the first rows of the job's evaluation or training data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.folders import write_text
from pantheraml.data import row_formats
from pantheraml.data.chunks import read_lines
from pantheraml.data.rows import Row, RowError
from pantheraml.service.chat.queue import ChatQueue
from pantheraml.specs.chat import ChatDone, ChatModel, ChatRequest, PromptRow

FILE_NAME = "samples.json"
"""In the job's folder."""
Gone = Callable[[], Awaitable[bool]]
"""Whether who asked has gone."""


@dataclass(frozen=True)
class Sample:
    line: int
    row: Row
    """Without what is to be written."""
    prompt: str
    """For people."""
    expected: str


def first_samples(path: Path, format: str, count: int) -> list[Sample]:
    """Return prompts and answers of the first rows; rows that begin with the assistant's words have no prompt, and are
    left out."""
    found: list[Sample] = []
    for chunk in read_lines(path, plain=False):
        for line, row in chunk.rows():
            if isinstance(row, RowError):  # checked when it was uploaded
                continue
            with contextlib.suppress(RowError):
                found.append(Sample(line, *row_formats.split_row(format, row_formats.validate_row(format, row))))
            if len(found) == count:
                return found
    return found


async def complete(
    samples: list[Sample], format: str, model: ChatModel, chat: ChatQueue, tokens: int, has_gone: Gone
) -> list[str]:
    """The likeliest continuation of each prompt. ApiError if the chat worker cannot."""
    answers = []
    for sample in samples:
        request = ChatRequest(
            id=chat.next_number(),
            model=model,
            prompt_row=PromptRow(format=format, row=sample.row),
            max_tokens=None,
            default_tokens=tokens,
            temperature=0.0,
            top_p=1.0,
            stop=[],
            seed=None,
        )
        ticket = chat.submit(request)
        chat.watch(ticket, has_gone)
        pieces = [reply.text async for reply in ticket.replies() if not isinstance(reply, ChatDone)]
        answers.append("".join(pieces))
    return answers


def write_samples(folder: Path, found: dict[str, Any]) -> None:
    write_text(folder / FILE_NAME, json.dumps(found))


def read_samples(folder: Path) -> dict[str, Any] | None:
    """Return the newest samples; None if there are none."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE_NAME).read_text("utf-8"))
    except FileNotFoundError:
        return None
    return found
