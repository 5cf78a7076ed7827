"""Find out from a chat template what starts and ends the turns of a conversation.

A probe conversation is rendered, and the text between its messages is read. Where a template writes something only in
some turns, such as an empty thought before the last reply, what is common to all turns counts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pantheraml.base.errors import ConfigError
from pantheraml.data.chat_templates.rendering import RENDER_ERRORS, Messages, in_parts, plain_tokenizer, render, turns

_ASK, _REPLY, _ASK_AGAIN, _REPLY_AGAIN = "zqAskOne", "zqReplyOne", "zqAskTwo", "zqReplyTwo"


@dataclass(frozen=True)
class TurnMarkers:
    instruction: str
    """What precedes a user message."""
    response: str
    """What precedes a reply, and is not part of it."""
    ends: frozenset[str]
    """Special tokens that end a reply."""


def infer_markers(tokenizer: Any) -> TurnMarkers:
    """Read the markers from the tokenizer's chat template; ConfigError if that is not possible."""
    try:
        return _infer(tokenizer, turns)
    except (*RENDER_ERRORS, _NotFoundError) as error:
        problem = error
    try:
        return _infer(tokenizer, lambda *contents: in_parts(turns(*contents)))
    except (*RENDER_ERRORS, _NotFoundError):
        raise ConfigError(
            f"The tokenizer's chat template does not show where responses start: {problem}",
            fix='Pass both markers, such as instruction_part="<|im_start|>user\\n", '
            'response_part="<|im_start|>assistant\\n".',
        ) from problem


class _NotFoundError(Exception):
    pass


def _infer(tokenizer: Any, talk: Callable[..., Messages]) -> TurnMarkers:
    whole = render(tokenizer, talk(_ASK, _REPLY, _ASK_AGAIN, _REPLY_AGAIN))
    prompt = render(tokenizer, talk(_ASK, _REPLY, _ASK_AGAIN), generation=True)
    asked = render(tokenizer, talk(_ASK, _REPLY, _ASK_AGAIN))
    between = _between(whole, _REPLY, _ASK_AGAIN)
    starts = [_between(whole, _ASK, _REPLY), _between(whole, _ASK_AGAIN, _REPLY_AGAIN)]
    if generated := _after(prompt, _ASK_AGAIN):
        starts.append(generated)
    special = _special_tokens(plain_tokenizer(tokenizer))
    response = _without_closing(_common_start(starts), _first(special, _after(asked, _ASK_AGAIN)))
    ends = frozenset[str]()
    if (last := _first(special, _after(whole, _REPLY_AGAIN))) is not None:
        inner = _first(special, between)
        ends = frozenset({last, inner or last})
        between = _without_closing(between, inner)
    if not response.strip() or not between.strip():
        raise _NotFoundError("there is no text between the messages")
    return TurnMarkers(between, response, ends)


def _common_start(texts: list[str]) -> str:
    same = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return "".join(characters[0] for characters in same)


def _without_closing(text: str, closing: str | None) -> str:
    """Remove the token that ends the turn before, unless nothing else is there."""
    start, _, rest = text.partition(closing) if closing is not None else ("", "", text)
    return rest.lstrip() if rest.strip() and not start.strip() else text.lstrip()


def _special_tokens(plain: Any) -> re.Pattern[str] | None:
    tokens = {*plain.all_special_tokens, *plain.get_added_vocab()}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _first(special: re.Pattern[str] | None, text: str) -> str | None:
    found = special.search(text) if special is not None else None
    return found.group() if found else None


def _after(text: str, message: str) -> str:
    _, found, rest = text.rpartition(message)
    if not found:
        raise _NotFoundError("it changes or leaves out messages")
    return rest


def _between(text: str, first: str, second: str) -> str:
    return _after(text.partition(second)[0] if second in text else "", first)
