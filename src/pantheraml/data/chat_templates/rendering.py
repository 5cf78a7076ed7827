"""Render conversations with a tokenizer's or a processor's chat template, for our own probes."""

from __future__ import annotations

from typing import Any

import jinja2

Messages = list[dict[str, Any]]

# raised by templates that reject a conversation, and by transformers if there is no template
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


def plain_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer inside a processor, or the tokenizer itself."""
    return getattr(tokenizer, "tokenizer", None) or tokenizer


def render(tokenizer: Any, messages: Messages, template: str | None = None, *, generation: bool = False) -> str:
    """Render with `template`, or with the tokenizer's own."""
    text: str = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=generation,
        date_string="26 Jul 2024",  # Llama's templates print it: two renderings are the same on all days
    )
    return text


def turns(*contents: str, system: str | None = None) -> Messages:
    """Return a conversation that alternates between user and assistant."""
    roles = ("user", "assistant")
    start = [] if system is None else [{"role": "system", "content": system}]
    return start + [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def in_parts(messages: Messages) -> Messages:
    """Return the messages with lists of parts as content, which some vision models' templates require."""
    return [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
