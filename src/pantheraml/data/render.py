"""Render conversations with a tokenizer's chat template, with limits on time, memory and output.

A template comes with the model and is a program: Jinja's sandbox keeps it from files and processes, but not from
infinite loops or from writing gibibytes. One timer serves all conversations of a chunk, so a conversation costs no
system call.
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
from pantheraml.base.memory_room import memory_limit
from pantheraml.data.bounds import MAX_DECODE_BYTES, MAX_ROW_BYTES, format_mib
from pantheraml.data.rows import Row, RowError, excerpt, reject_surrogates

RENDER_SECONDS = 10
"""Maximum CPU time of a chat template for one conversation."""
STUCK_SECONDS = 30
"""CPU time after which the kernel kills a process whose template is stuck where no signal reaches Python."""
RENDERED_BASE = 256 << 10
RENDERED_FACTOR = 16
"""A rendered conversation may have at most RENDERED_BASE + RENDERED_FACTOR times the characters of its messages and
tools, and at most 2 * MAX_ROW_BYTES."""
TEMPLATE_CHARACTERS = 1 << 20
"""Maximum length of a chat template."""

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
# raised by template expressions when a conversation is not what the template expects
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)

Span = tuple[int, int]


def chat_template(tokenizer: Any) -> str:
    """Return the chat template; ModelError if there is none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as err:  # none at all, or several and none of them the default
        raise ModelError(
            "The data has messages, but the tokenizer has no chat template to render them.",
            fix="Choose a tokenizer that has one with model.tokenizer (such as that of the model's chat version), add "
            "a chat_template.jinja to its folder, or use prompt and completion columns.",
        ) from err
    if len(template) > TEMPLATE_CHARACTERS:
        raise ModelError(
            f"The tokenizer's chat template has {len(template)} characters; the maximum is {TEMPLATE_CHARACTERS}.",
            fix="Choose another tokenizer with model.tokenizer.",
        )
    return template


class _RenderTimeout(BaseException):
    """Raised by the timer's signal handler, inside the template. Not an Exception: Jinja's compiler swallows those."""


class Renderer:
    """Renders conversations with one tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        chat_template(tokenizer)  # raises if there is none
        self._tokenizer = tokenizer
        self._started: float | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_CPU)

    def has_generation_marks(self, tools: list[Row] | None) -> bool:
        """Return whether the template marks assistant text with {% generation %}."""
        return bool(_GENERATION_MARK.search(self._tokenizer.get_chat_template(tools=tools)))

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Limit the memory of rendering and, in the main thread, its CPU time."""
        try:
            with memory_limit(), self._timer():
                yield
        except _RenderTimeout as err:  # the signal arrived at the very end of a conversation
            raise _timeout_error() from err
        except MemoryError as err:
            raise _template_error(
                f"takes more than {format_mib(MAX_DECODE_BYTES)} of memory for the conversations of one chunk"
            ) from err

    def text(self, messages: list[Row], tools: list[Row] | None, *, add_generation_prompt: bool = False) -> str:
        """Render the conversation."""
        text, _ = self._render(messages, tools, add_generation_prompt=add_generation_prompt)
        return text

    def marked(self, messages: list[Row], tools: list[Row] | None) -> tuple[str, list[Span]]:
        """Render the conversation, and return the character spans within {% generation %} marks."""
        return self._render(messages, tools, return_assistant_tokens_mask=True)

    def _render(self, messages: list[Row], tools: list[Row] | None, **options: Any) -> tuple[str, list[Span]]:
        self._started = time.process_time()
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(tools=tools),
                **self._tokenizer.special_tokens_map,
                **options,
            )
        except _RenderTimeout as err:
            raise _timeout_error() from err
        except _TEMPLATE_ERRORS as err:
            raise RowError(
                f"expected a conversation that the chat template accepts: {excerpt(str(err))}", "messages"
            ) from err
        finally:
            self._started = None
        text = texts[0]
        reject_surrogates(text, "messages")
        if len(text) > RENDERED_BASE:
            _check_length(len(text), text_length([messages, tools]))
        return text, spans[0] if spans else []

    @contextlib.contextmanager
    def _timer(self) -> Iterator[None]:
        """Check the time of the current conversation every second of CPU time."""
        if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
            yield
            return
        self._limits = resource.getrlimit(resource.RLIMIT_CPU)
        before = signal.signal(signal.SIGVTALRM, self._check_time)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1.0, 1.0)
        _extend_cpu_limit(self._limits)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
            resource.setrlimit(resource.RLIMIT_CPU, self._limits)

    def _check_time(self, *_: object) -> None:
        if self._started is not None and time.process_time() - self._started > RENDER_SECONDS:
            raise _RenderTimeout
        _extend_cpu_limit(self._limits)


def _check_length(rendered: int, source: int) -> None:
    maximum = min(RENDERED_BASE + RENDERED_FACTOR * source, 2 * MAX_ROW_BYTES)
    if rendered > maximum:
        raise _template_error(
            f"renders {rendered} characters from a conversation of {source}; the maximum is {maximum}"
        )


def _extend_cpu_limit(limits: tuple[int, int]) -> None:
    """Have the kernel kill this process unless called again in time; `limits` are the process's original CPU limits.

    A signal handler only runs between two bytecodes, and some, such as summing a huge range, may never return.
    """
    until = int(time.process_time()) + STUCK_SECONDS
    if all(limit == resource.RLIM_INFINITY or until < limit for limit in limits):
        resource.setrlimit(resource.RLIMIT_CPU, (until, limits[1]))


def text_length(value: Any) -> int:
    """Return the total length of all text in a value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + text_length(inner) for key, inner in value.items())
    if isinstance(value, list):
        return sum(map(text_length, value))
    return 1


def _timeout_error() -> ModelError:
    return _template_error(f"takes more than {RENDER_SECONDS} seconds for one conversation")


def _template_error(what: str) -> ModelError:
    return ModelError(
        f"The tokenizer's chat template {what}.",
        fix="Correct the template, or choose another tokenizer with model.tokenizer.",
    )
