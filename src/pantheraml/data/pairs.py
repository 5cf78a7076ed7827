"""Tokenize prompt/answer pairs, so that prompt tokens match generation and the two decode to the exact text.

Tokenizing them separately is wrong for tokenizers that change the start of a text: SentencePiece-like ones insert a
space, and "def f" + "oo(bar)" becomes "def f oo(bar)". So prompt and answer are tokenized together:

1. If the boundary falls between two tokens, the tokens before it are the prompt's. This is the usual case.
2. If a token straddles the boundary, generation would never see it, since it starts from the tokens of the prompt
   alone. So the prompt keeps its own tokens, and the answer is tokenized as a continuation: after an anchor character,
   which its tokens are separated from by their offsets.
3. If no anchor can be separated, the joint tokens are used, and the straddling one bears loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Ids = list[int]

# a digit, a line break, a letter, punctuation: whatever an answer starts with, tokenizers separate it from one of these
_ANCHORS = ("0", "\n", "a", ".", "#")


def encode_pairs(tokenizer: Any, prompts: list[str], answers: list[str]) -> list[tuple[Ids, Ids]]:
    """Return the token ids of each prompt and its answer, without special tokens."""
    joint = _encodings(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    pairs: list[tuple[Ids, Ids]] = []
    straddling: list[int] = []  # known or possible
    lossless = _keeps_every_character(tokenizer)
    for index, (prompt, encoding) in enumerate(zip(prompts, joint, strict=True)):
        boundary, clean = _boundary(encoding, len(prompt))
        pairs.append((encoding.ids[:boundary], encoding.ids[boundary:]))
        if not (clean and lossless):
            straddling.append(index)
    alone = dict(zip(straddling, plain_ids(tokenizer, [prompts[index] for index in straddling]), strict=True))
    separate: dict[int, str] = {}
    for index, prompt_ids in alone.items():
        encoding = joint[index]
        same = encoding.ids[: len(prompt_ids)] == prompt_ids
        if same and _end(encoding, len(prompt_ids) - 1) <= len(prompts[index]):
            pairs[index] = (prompt_ids, encoding.ids[len(prompt_ids) :])
        else:
            separate[index] = answers[index]
    for index, continuation in _continuations(tokenizer, separate):
        pairs[index] = (alone[index], continuation)
    return pairs


def _keeps_every_character(tokenizer: Any) -> bool:
    """Return whether every character belongs to a token.

    Then a boundary between two tokens separates two independent texts: merges and lattices that do not cross it are the
    same for either side alone. If white space is dropped or missing from offsets, its owner is unknown.
    """
    for text in ("a b", "a ", "a\n", "a  b"):
        (encoding,) = _encodings(tokenizer, [text])
        if len({place for start, end in encoding.offsets for place in range(start, end)}) < len(text):
            return False
    return True


def _boundary(encoding: Any, characters: int) -> tuple[int, bool]:
    """Return the first token that reaches past `characters`, and whether it starts at or after them."""
    token = encoding.char_to_token(characters)
    if token is None or (token and _end(encoding, token - 1) > characters):  # several tokens for one character
        token = _first_after(encoding, characters)
    return token, _start(encoding, token) >= characters


def plain_ids(tokenizer: Any, texts: list[str]) -> list[Ids]:
    """Return the token ids of each text, without special tokens."""
    if not texts:
        return []
    ids: list[Ids] = _encoded(tokenizer, texts)["input_ids"]
    return ids


def _continuations(tokenizer: Any, answers: dict[int, str]) -> Iterator[tuple[int, Ids]]:
    """Yield the tokens of each answer as a continuation of other text, if they can be separated from it."""
    for anchor in _ANCHORS:
        if not answers:
            return
        encodings = _encodings(tokenizer, [anchor + answer for answer in answers.values()])
        for index, encoding in zip(list(answers), encodings, strict=True):
            boundary = _first_after(encoding, len(anchor))
            if boundary and _start(encoding, boundary) >= len(anchor):
                del answers[index]
                yield index, encoding.ids[boundary:]


def _first_after(encoding: Any, position: int) -> int:
    """Return the first token that reaches past character `position`; white-space tokens may have zero width."""
    return next((index for index, (_, end) in enumerate(encoding.offsets) if end > position), len(encoding))


def _start(encoding: Any, index: int) -> int:
    start: int = encoding.token_to_chars(index)[0] if index < len(encoding) else 1 << 62
    return start


def _end(encoding: Any, index: int) -> int:
    end: int = encoding.token_to_chars(index)[1] if index >= 0 else 0
    return end


def _encodings(tokenizer: Any, texts: list[str]) -> list[Any]:
    encodings: list[Any] = _encoded(tokenizer, texts).encodings
    return encodings


def _encoded(tokenizer: Any, texts: list[str]) -> Any:
    return tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
