"""`get_chat_template`: give a tokenizer a chat template.

A tokenizer keeps its own template if that renders conversations exactly as the named format does: the model's own also
knows tools and images. Otherwise it gets ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, ModelError
from pantheraml.data.chat_templates.registry import KNOWN_NAMES, find_format
from pantheraml.data.chat_templates.rendering import RENDER_ERRORS, plain_tokenizer, render, turns
from pantheraml.data.chat_templates.turn_format import literal, with_end_of_turn

logger = log.get(__name__)

STANDARD_NAMES: Mapping[str, str] = {"role": "role", "content": "content", "user": "user", "assistant": "assistant"}
_OWN_EOS = "eos_token"
"""In a (template, eos) pair: the tokenizer's own eos token."""
_GEMMA_TOKEN = "<start_of_turn>"


def get_chat_template(
    tokenizer: Any,
    chat_template: str | tuple[str, str] | list[str] = "chatml",
    mapping: Mapping[str, str] = STANDARD_NAMES,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> Any:
    """Set the chat template of a tokenizer or processor, and return it.

    `chat_template`: the name of a format, a (Jinja template, eos token) pair, or a Jinja template.
    `mapping`: the names of keys and roles in the data; messages in the standard form work as well.
    `map_eos_token`: make the format's end-of-turn token the eos token, so that generation stops at it. A format whose
    token is not in the vocabulary ends its turns with the present eos token instead.
    `system_message`: used for conversations that have none.
    """
    names = _checked_mapping(mapping)
    plain = plain_tokenizer(tokenizer)
    if isinstance(chat_template, str) and not _is_jinja(chat_template):
        template, eos = _named_template(tokenizer, chat_template, map_eos_token)
    else:
        template, eos = _given_template(plain, chat_template)
    template = _prelude(names, system_message) + template
    _check_renders(tokenizer, template)
    if map_eos_token and eos is not None:
        plain.eos_token = eos
    for each in {id(tokenizer): tokenizer, id(plain): plain}.values():
        each.chat_template = template
    return tokenizer


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def _checked_mapping(mapping: Mapping[str, str]) -> dict[str, str]:
    if unknown := sorted(set(mapping) - set(STANDARD_NAMES)):
        raise ConfigError(
            f"mapping has the unknown key {unknown[0]!r}.", fix=f"Its keys are: {', '.join(STANDARD_NAMES)}."
        )
    return {**STANDARD_NAMES, **mapping}


def _named_template(tokenizer: Any, name: str, map_eos_token: bool) -> tuple[str, str | None]:
    """Return the template of a format, and its end-of-turn token if the vocabulary has it."""
    plain, chat_format = plain_tokenizer(tokenizer), find_format(name)
    vocabulary, end = plain.get_vocab(), chat_format.end_of_turn
    if end is not None and end not in vocabulary:
        if not map_eos_token:
            logger.warning("%s: %s is not in the vocabulary and becomes plain text", name, end)
        elif plain.eos_token is None:
            raise ModelError(
                f"The chat template {name!r} ends turns with {end}, which is not in the vocabulary, and the tokenizer "
                "has no eos token to use instead.",
                fix=f"Set tokenizer.eos_token, or add {end} as a token and resize the model's embeddings.",
            )
        else:
            logger.warning(
                "%s: %s is not in the vocabulary, so turns end with the eos token %s instead; to train %s, add it as "
                "a token and resize the model's embeddings",
                name, end, plain.eos_token, end,
            )  # fmt: skip
            end = None
    template = with_end_of_turn(chat_format.template, end)
    if _GEMMA_TOKEN in vocabulary and "bos_token" not in template:
        template = "{{- bos_token -}}" + template  # Gemma's loss is far too high without it
    own = _own_template(tokenizer)
    if own is not None and _render_alike(tokenizer, own, template):
        template = own
    return template, end


def _given_template(plain: Any, given: Any) -> tuple[str, str | None]:
    if isinstance(given, str):
        return given, None
    if not isinstance(given, tuple | list) or len(given) != 2 or not all(isinstance(each, str) for each in given):
        raise ConfigError(
            f"chat_template is {type(given).__name__}.",
            fix="Pass a name, a (Jinja template, eos token) pair, or a Jinja template.",
        )
    template, eos = given
    if eos == _OWN_EOS:
        return template, None
    if eos not in plain.get_vocab():
        raise ConfigError(
            f"The eos token {eos!r} of the chat template is not in the tokenizer's vocabulary.",
            fix=f'Write {{{{ eos_token }}}} in the template and pass (template, "{_OWN_EOS}"), or add the token to the '
            "tokenizer and resize the model's embeddings.",
        )
    return template, eos


def _own_template(tokenizer: Any) -> str | None:
    own = tokenizer.chat_template
    return own if isinstance(own, str) else None


def _render_alike(tokenizer: Any, one: str, other: str) -> bool:
    """Return whether two templates render the same text, with a system message and without, in training and after."""
    conversations = [
        (turns(" one ", "two", "three", "four"), False),
        (turns("one", "two\n", "three"), True),
        (turns("one", "two", system="zero"), False),
        (turns("one", system=" zero"), True),
    ]
    try:
        return all(
            render(tokenizer, messages, one, generation=generation)
            == render(tokenizer, messages, other, generation=generation)
            for messages, generation in conversations
        )
    except RENDER_ERRORS:  # one of them rejects a conversation
        return False


def _prelude(names: Mapping[str, str], system_message: str | None) -> str:
    """Return Jinja that brings `messages` into the form that templates expect; empty if there is nothing to do."""
    parts = []
    if names != STANDARD_NAMES:
        parts.append(_rename_keys(names))
    if system_message is not None:
        parts.append(
            "{%- if not messages or messages[0].role not in ['system', 'developer'] -%}"
            f"{{%- set messages = [dict(role='system', content={literal(system_message)})] + messages | list -%}}"
            "{%- endif -%}"
        )
    # an empty output, so that Jinja trims no white space at the start of the template that follows
    return "".join(parts) + "{{- '' }}" if parts else ""


def _rename_keys(names: Mapping[str, str]) -> str:
    role, content = literal(names["role"]), literal(names["content"])
    roles = f"{{{literal(names['user'])}: 'user', {literal(names['assistant'])}: 'assistant'}}"
    return (
        "{%- set renamed = namespace(messages=[]) -%}"
        "{%- for message in messages -%}"
        f"{{%- set name = message[{role}] if message[{role}] else message['role'] -%}}"
        f"{{%- set words = message[{content}] if message[{content}] is not none and {content} in message "
        "else message['content'] -%}"
        f"{{%- set message = dict(message, role={roles}.get(name, name), content=words) -%}}"
        "{%- set renamed.messages = renamed.messages + [message] -%}"
        "{%- endfor -%}"
        "{%- set messages = renamed.messages -%}"
    )


def _check_renders(tokenizer: Any, template: str) -> None:
    try:
        render(tokenizer, turns("one", "two", "three"), template, generation=True)
    except RENDER_ERRORS as err:
        raise ConfigError(
            f"The chat template cannot render a conversation of three turns: {err}",
            fix="Correct the template: messages have the keys role and content.",
        ) from err


def _as_pair(name: str) -> tuple[str, str]:
    chat_format = find_format(name)
    return with_end_of_turn(chat_format.template, chat_format.end_of_turn), chat_format.end_of_turn or _OWN_EOS


CHAT_TEMPLATES: Mapping[str, tuple[str, str]] = {name: _as_pair(name) for name in KNOWN_NAMES}
"""The formats by name, as (Jinja template, eos token) pairs, for scripts that list them or change one."""
