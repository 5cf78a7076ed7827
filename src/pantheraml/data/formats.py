"""Row formats, and how a row becomes one document.

    format        columns                          document (loss on the part in brackets)
    text          text                             [text EOS]
    prompt        prompt, completion               prompt [completion EOS]
    instruction   instruction, (input,) output     the template below [output EOS]
                  (system, history)
    messages      messages: [{role, content}]      the tokenizer's chat template; loss on assistant turns
                  (tools)

A document starts with the tokenizer's prefix (a BOS token, or nothing); its first token never bears loss. A prompt has
the same tokens in training as in generation, and the completion continues it without a seam (pairs.py).

The instruction template; missing or empty parts are left out. Each pair of `history` is rendered as an instruction and
its response, before the last one:

    {system}

    ### Instruction:
    {history[0][0]}

    ### Response:
    {history[0][1]}

    ### Instruction:
    {instruction}

    ### Input:
    {input}

    ### Response:
    {output}
"""

from __future__ import annotations

from typing import Any

from pantheraml.base.errors import ModelError, UnsupportedModelError
from pantheraml.data.chat import ChatEncoder
from pantheraml.data.documents import Ints, as_ints
from pantheraml.data.pairs import encode_pairs, plain_ids
from pantheraml.data.rows import Row, RowError

Encoded = tuple[Ints, Ints]
"""Tokens of a document and its loss runs, which are empty if no token bears loss."""


class Encoder:
    """Encodes validated rows of one format into token documents."""

    def __init__(self, format: str, tokenizer: Any) -> None:
        self._format = format
        self._tokenizer = tokenizer
        self._prefix = special_prefix(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        self._chat = ChatEncoder(tokenizer) if format == "messages" else None

    def encode(self, rows: list[Row]) -> list[Encoded | RowError]:
        if self._chat is not None:
            return self._chat.encode(rows)
        if self._format == "text":
            return [self._document([], ids) for ids in plain_ids(self._tokenizer, [row["text"] for row in rows])]
        prompts = [row["prompt"] if self._format == "prompt" else _instruction(row) for row in rows]
        answers = [row["completion" if self._format == "prompt" else "output"] for row in rows]
        return [self._document(*pair) for pair in encode_pairs(self._tokenizer, prompts, answers)]

    def _document(self, prompt: list[int], answer: list[int]) -> Encoded:
        if not answer:  # nothing to learn but the end token
            return as_ints([]), as_ints([])
        tokens = _with_prefix(self._prefix, prompt + answer)
        prompt_length = len(tokens) - len(answer)
        if self._eos is not None and tokens[-1:] != [self._eos]:
            tokens.append(self._eos)
        skipped = max(1, prompt_length)  # the first token has no context to be predicted from
        return as_ints(tokens), as_ints([skipped, len(tokens) - skipped] if len(tokens) > skipped else [])


def _instruction(row: Row) -> str:
    system = f"{row['system']}\n\n" if row.get("system") else ""
    earlier = "".join(
        f"### Instruction:\n{instruction}\n\n### Response:\n{response}\n\n"
        for instruction, response in row.get("history", ())
    )
    extra = f"### Input:\n{row['input']}\n\n" if row.get("input") else ""
    return f"{system}{earlier}### Instruction:\n{row['instruction']}\n\n{extra}### Response:\n"


def special_prefix(tokenizer: Any) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text: usually one BOS token, or none."""
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"The tokenizer {type(tokenizer).__name__} has no fast (Rust) implementation.",
            fix="Convert it to a tokenizer.json, or choose another one with model.tokenizer.",
        )
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    raise ModelError(
        "The tokenizer tokenizes text differently with special tokens, so documents have no well-defined prefix.",
        fix="Choose another tokenizer with model.tokenizer.",
    )


def _with_prefix(prefix: list[int], ids: list[int]) -> list[int]:
    """Prepend the prefix unless it is already there: pre-rendered text often starts with a BOS token."""
    return list(ids) if ids[: len(prefix)] == prefix else prefix + ids


def render_prompt(format: str, prompt: str, tokenizer: Any) -> list[int]:
    """Tokenize a user's prompt exactly like a prompt in training data of that format.

    For `instruction` the prompt is the instruction (without input), for `messages` a single user turn.
    """
    if format == "messages":
        return prompt_ids(format, {"messages": [{"role": "user", "content": prompt}]}, tokenizer)
    return prompt_ids(format, {format: prompt}, tokenizer)


def prompt_ids(format: str, row: Row, tokenizer: Any) -> list[int]:
    """Tokens of a row without its answer (`row_formats.split_row`), as they come before the answer in training."""
    if format == "messages":
        return ChatEncoder(tokenizer).prompt(row["messages"], row.get("tools"))
    text = _instruction(row) if format == "instruction" else row[format]
    return _with_prefix(special_prefix(tokenizer), plain_ids(tokenizer, [text])[0])
