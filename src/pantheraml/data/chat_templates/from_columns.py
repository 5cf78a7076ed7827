"""Conversations from columns of text, and a chat template from an example of it.

`to_sharegpt` makes conversations of a data set with an instruction and an answer; `apply_chat_template` learns a format
from one or two turns written out with {INPUT} and {OUTPUT}, and renders a data set's conversations with it.
"""

from __future__ import annotations

import re
from typing import Any

from pantheraml.base.errors import ConfigError, DataError
from pantheraml.data.chat_templates.install import get_chat_template
from pantheraml.data.chat_templates.rendering import plain_tokenizer
from pantheraml.data.chat_templates.turn_format import literal
from pantheraml.data.rows import Row, join_names

_OPTIONAL = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_COLUMN = re.compile(r"\{(\w+)\}")
_DEFAULT_SYSTEM = "You are a helpful assistant."


def to_sharegpt(
    dataset: Any,
    merged_prompt: str = "",
    merged_column_name: str = "instruction",
    output_column_name: str = "output",
    remove_unused_columns: bool = True,
    conversation_extension: int = 1,
    random_state: int = 3407,
) -> Any:
    """Return a datasets.Dataset with `conversations`: what the user writes, and the answer.

    `merged_prompt`: the user's text with columns in braces; a part in [[double brackets]] is left out of rows in which
    one of its columns is empty. Without it, the user's text is the column `merged_column_name`.
    `conversation_extension`: join this many rows, chosen at random, to one conversation.
    """
    prompt = merged_prompt or f"{{{merged_column_name}}}"
    columns = [*_COLUMN.findall(prompt), output_column_name]
    if missing := [name for name in columns if name not in dataset.column_names]:
        raise DataError(
            f"The data set has no column {join_names(missing)}.",
            fix=f"Its columns are {join_names(dataset.column_names)}.",
        )
    if conversation_extension < 1:
        raise ConfigError(f"conversation_extension is {conversation_extension}.", fix="Use 1 or more.")

    def convert(row: Row) -> Row:
        turn = (("human", _merge(prompt, row)), ("gpt", _text(row[output_column_name])))
        return {"conversations": [{"from": speaker, "value": text} for speaker, text in turn]}

    removed = dataset.column_names if remove_unused_columns else None
    converted = dataset.map(convert, remove_columns=removed, desc="Making conversations")
    orders = [converted.shuffle(seed=random_state + n)["conversations"] for n in range(1, conversation_extension)]
    if not orders:
        return converted

    def extend(row: Row, index: int) -> Row:
        return {"conversations": sum((order[index] for order in orders), row["conversations"])}

    return converted.map(extend, with_indices=True, desc="Extending conversations")


def _merge(prompt: str, row: Row) -> str:
    def fill(text: str) -> str:
        return _COLUMN.sub(lambda match: _text(row[match[1]]), text)

    parts = _OPTIONAL.split(prompt)  # plain and optional parts in turn
    kept = [
        fill(part)
        for number, part in enumerate(parts)
        if number % 2 == 0 or all(_text(row[name]) for name in _COLUMN.findall(part))
    ]
    return "".join(kept)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def apply_chat_template(
    dataset: Any,
    tokenizer: Any = None,
    chat_template: str = "",
    default_system_message: str = _DEFAULT_SYSTEM,
) -> Any:
    """Give the tokenizer the chat template that the example shows, and the data set a column `text` rendered with it.

    `chat_template`: one turn, or two, written with {INPUT} and {OUTPUT}, and {SYSTEM} before them if the format has a
    system message. What precedes the turns replaces a missing system message. A turn ends with the eos token.
    The column `text` has no bos token: the trainer's tokenization adds it.
    """
    if tokenizer is None:
        raise ConfigError("apply_chat_template needs a tokenizer.", fix="Pass tokenizer=tokenizer.")
    plain = plain_tokenizer(tokenizer)
    get_chat_template(tokenizer, (_jinja(plain, chat_template, default_system_message), plain.eos_token))
    bos = plain.bos_token or ""

    def render(row: Row) -> Row:
        return {"text": plain.apply_chat_template(row["conversations"], tokenize=False).removeprefix(bos)}

    return dataset.map(render, desc="Applying the chat template")


def _jinja(tokenizer: Any, example: str, default_system: str) -> str:
    if tokenizer.eos_token is None:
        raise ConfigError("The tokenizer has no eos token, which ends a turn.", fix="Set tokenizer.eos_token.")
    preamble, header, answer, end = _parts(example, tokenizer.eos_token)
    before, slot, after = preamble.partition("{SYSTEM}")
    own = f"{literal(before)} ~ messages[0].content ~ {literal(after)}" if slot else "messages[0].content"
    default = literal(before + default_system + after) if slot else literal(preamble)
    return (
        ("{{- bos_token -}}" if tokenizer.bos_token else "")
        + "{%- if messages and messages[0].role == 'system' -%}{{- " + own + " -}}{%- set turns = messages[1:] -%}"
        + "{%- else -%}{{- " + default + " -}}{%- set turns = messages -%}{%- endif -%}"
        + "{%- for message in turns -%}"
        + "{%- if message.role == 'user' -%}{{- " + f"{literal(header)} ~ message.content" + " -}}"
        + "{%- elif message.role == 'assistant' -%}"
        + "{{- " + f"{literal(answer)} ~ message.content ~ {literal(end)}" + " -}}"
        + "{%- else -%}{{- raise_exception('Only user and assistant turns follow the system message.') -}}{%- endif -%}"
        + "{%- endfor -%}{%- if add_generation_prompt -%}{{- " + literal(answer) + " -}}{%- endif -%}"
    )  # fmt: skip


def _parts(example: str, eos: str) -> tuple[str, str, str, str]:
    """Return the preamble, what precedes a user's text, what precedes an answer, and what ends it."""
    pieces = re.split(r"\{INPUT\}|\{OUTPUT\}", example.lstrip())
    order = re.findall(r"\{INPUT\}|\{OUTPUT\}", example)
    if order not in (["{INPUT}", "{OUTPUT}"], ["{INPUT}", "{OUTPUT}"] * 2):
        raise ConfigError(
            "chat_template must have {INPUT} and then {OUTPUT}, once or twice.",
            fix='For example "### Instruction:\\n{INPUT}\\n\\n### Response:\\n{OUTPUT}".',
        )
    head, between, tail = pieces[0], pieces[1], pieces[-1]
    if len(order) == 2:  # the turn's heading begins at the last blank line
        cut = head.rfind("\n\n")
        header = head[cut:] if cut >= 0 else head
    else:
        header = pieces[2].removeprefix(tail)
        if not head.endswith(header) or pieces[3] != between:
            raise ConfigError("The two turns in chat_template differ.", fix="Write the same turn twice.")
    end = tail if eos in tail else tail + eos
    return head.removesuffix(header), header, between, end
