"""Rendering conversations with a tokenizer's chat template, within bounds.

A template comes with the model and is a program: Jinja's sandbox keeps it from files and processes, but not from
looping for ever or from writing gibibytes. So time, memory and text of one conversation are bounded. One timer serves
all conversations of a chunk, so a conversation costs no system call.
"""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from pantheraml.base.errors import ModelError
from pantheraml.base.memory_room import memory_room
from pantheraml.data.bounds import DECODING_ROOM, ROW_BYTES, mebibytes
from pantheraml.data.rows import Row, RowError, brief, refuse_surrogates

RENDER_SECONDS = 10
"""CPU time that a chat template may take for one conversation."""
STUCK_SECONDS = 30
"""CPU time after which the kernel ends a process whose template is stuck where no signal reaches Python."""
RENDERED_BASE = 256 << 10
RENDERED_FACTOR = 16
"""A rendered conversation may have RENDERED_BASE + RENDERED_FACTOR times the characters of its messages and tools, and
no more than two rows."""
TEMPLATE_CHARACTERS = 1 << 20
"""The longest chat template."""

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# what expressions of a template raise when a conversation is not what it expects
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)

Span = tuple[int, int]


def chat_template(tokenizer: Any) -> str:
    """The template that conversations are written with; ModelError where there is none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as err:  # none at all, or several and none of them the default
        raise ModelError(
            "The data holds messages, but the tokenizer has no chat template to write them with.",
            todo="Name a tokenizer that has one with model.tokenizer (such as the model's chat version's), add "
            "a chat_template.jinja to its folder, or use prompt and completion columns.",
        ) from err
    if len(template) > TEMPLATE_CHARACTERS:
        raise ModelError(
            f"The tokenizer's chat template has {len(template)} characters; the most is {TEMPLATE_CHARACTERS}.",
            todo="Name another tokenizer with model.tokenizer.",
        )
    return template


class _TooSlow(BaseException):
    """Raised by the timer, inside whatever the template was doing. No Exception: Jinja's compiler swallows those."""


class Renderer:
    """Texts of conversations, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        chat_template(tokenizer)  # refuses a tokenizer without one
        self._tokenizer = tokenizer
        self._started: float | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_CPU)

    def marks_turns(self, tools: list[Row] | None) -> bool:
        """Whether the template says itself what the assistant wrote."""
        return bool(_GENERATION_MARK.search(self._tokenizer.get_chat_template(tools=tools)))

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Within this, rendering is bounded in memory and, in the main thread, in time."""
        try:
            with memory_room(), self._timer():
                yield
        except _TooSlow as err:  # at the very end of a conversation
            raise _too_slow() from err
        except MemoryError as err:
            raise _template_error(
                f"takes more than {mebibytes(DECODING_ROOM)} of memory for the conversations of one chunk"
            ) from err

    def text(self, messages: list[Row], tools: list[Row] | None, *, add_generation_prompt: bool = False) -> str:
        """The conversation as the template writes it."""
        text, _ = self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)
        return text

    def marked(self, messages: list[Row], tools: list[Row] | None) -> tuple[str, list[Span]]:
        """The conversation, and which of its characters stand within {% generation %} marks."""
        return self._rendered(messages, tools, return_assistant_tokens_mask=True)

    def _rendered(self, messages: list[Row], tools: list[Row] | None, **options: Any) -> tuple[str, list[Span]]:
        self._started = time.process_time()
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                **self._tokenizer.special_tokens_map,
                **options,
            )
        except _TooSlow as err:
            raise _too_slow() from err
        except _REFUSALS as err:
            raise RowError(
                f"expected a conversation that the chat template accepts: {brief(str(err))}", "messages"
            ) from err
        finally:
            self._started = None
        text = texts[0]
        refuse_surrogates(text, "messages")
        if len(text) > RENDERED_BASE:
            _refuse_length(len(text), characters([messages, tools]))
        return text, spans[0] if spans else []

    @contextlib.contextmanager
    def _timer(self) -> Iterator[None]:
        """Looks every second of CPU time how long the present conversation has taken."""
        if threading.current_thread() is not threading.main_thread():  # signals come to the main thread alone
            yield
            return
        self._limits = resource.getrlimit(resource.RLIMIT_CPU)
        before = signal.signal(signal.SIGVTALRM, self._look)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1.0, 1.0)
        _end_if_stuck(self._limits)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            resource.setrlimit(resource.RLIMIT_CPU, self._limits)

    def _look(self, *_: object) -> None:
        if self._started is not None and time.process_time() - self._started > RENDER_SECONDS:
            raise _TooSlow
        _end_if_stuck(self._limits)


def _refuse_length(written: int, given: int) -> None:
    most = min(RENDERED_BASE + RENDERED_FACTOR * given, 2 * ROW_BYTES)
    if written > most:
        raise _template_error(f"makes {written} characters of a conversation of {given}; the most is {most}")


def _end_if_stuck(limits: tuple[int, int]) -> None:
    """Have the kernel end this process unless this is called again in time; `limits` are those it came with.

    A handler runs between two steps of Python only, and some steps, such as adding up a list, may take for ever.
    """
    until = int(time.process_time()) + STUCK_SECONDS
    if all(limit == resource.RLIM_INFINITY or until < limit for limit in limits):
        resource.setrlimit(resource.RLIMIT_CPU, (until, limits[1]))


def characters(value: Any) -> int:
    """The length of all text in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + characters(inner) for key, inner in value.items())
    if isinstance(value, list):
        return sum(map(characters, value))
    return 1


def _too_slow() -> ModelError:
    return _template_error(f"takes more than {RENDER_SECONDS} seconds for one conversation")


def _template_error(what: str) -> ModelError:
    return ModelError(
        f"The tokenizer's chat template {what}.",
        todo="Correct the template, or name another tokenizer with model.tokenizer.",
    )
