"""Tokens of a prompt and of its answer: together they are the text, and the prompt is the one that is generated from.

Tokenizing the two apart is wrong where a tokenizer changes the start of a text: those like SentencePiece put a space
there, and "def f" + "oo(bar)" became "def f oo(bar)". So prompt and answer are tokenized together:

1. Where the border lies between two tokens, those before it are the prompt's own. This is the usual case.
2. Where a token reaches over the border, generation would never meet it: it starts from the tokens of the prompt alone.
   So these are kept, and the answer is tokenized as the continuation of a text: behind an anchor, of which its tokens
   are told apart by their offsets.
3. Where no anchor can be told apart, the tokens of the whole are used, and the one that reaches over bears loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Ids = list[int]

# digits, line ends, letters and marks: whatever an answer starts with, tokenizers keep one of them apart from it
_ANCHORS = ("0", "\n", "a", ".", "#")


def encode_pairs(tokenizer: Any, prompts: list[str], answers: list[str]) -> list[tuple[Ids, Ids]]:
    """Token ids of each prompt and of its answer, without special tokens around them."""
    wholes = _encodings(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    pairs: list[tuple[Ids, Ids]] = []
    astride: list[int] = []  # also those of which it is not known
    seamless = _keeps_every_character(tokenizer)
    for index, (prompt, whole) in enumerate(zip(prompts, wholes, strict=True)):
        border, clean = _border(whole, len(prompt))
        pairs.append((whole.ids[:border], whole.ids[border:]))
        if not (clean and seamless):
            astride.append(index)
    alone = dict(zip(astride, plain_ids(tokenizer, [prompts[index] for index in astride]), strict=True))
    apart: dict[int, str] = {}
    for index, given in alone.items():
        whole = wholes[index]
        if whole.ids[: len(given)] == given and _end(whole, len(given) - 1) <= len(prompts[index]):
            pairs[index] = (given, whole.ids[len(given) :])
        else:
            apart[index] = answers[index]
    for index, continued in _continuations(tokenizer, apart):
        pairs[index] = (alone[index], continued)
    return pairs


def _keeps_every_character(tokenizer: Any) -> bool:
    """Whether every character belongs to a token.

    Then a border between two tokens is one between two independent texts: merges and lattices that do not reach over it
    are those of either side alone. Where white space is dropped or left out of offsets, it is not known whose it is.
    """
    for text in ("a b", "a ", "a\n", "a  b"):
        (encoding,) = _encodings(tokenizer, [text])
        if len({place for start, end in encoding.offsets for place in range(start, end)}) < len(text):
            return False
    return True


def _border(encoding: Any, characters: int) -> tuple[int, bool]:
    """The first token that holds anything behind so many characters, and whether it holds nothing before them."""
    found = encoding.char_to_token(characters)
    if found is None or (found and _end(encoding, found - 1) > characters):  # several tokens for one character
        found = _first_after(encoding, characters)
    return found, _start(encoding, found) >= characters


def plain_ids(tokenizer: Any, texts: list[str]) -> list[Ids]:
    """Token ids of each text, without special tokens around it."""
    if not texts:
        return []
    ids: list[Ids] = _encoded(tokenizer, texts)["input_ids"]
    return ids


def _continuations(tokenizer: Any, answers: dict[int, str]) -> Iterator[tuple[int, Ids]]:
    """Tokens of each answer as they follow other text, where they can be told from it."""
    for anchor in _ANCHORS:
        if not answers:
            return
        encodings = _encodings(tokenizer, [anchor + answer for answer in answers.values()])
        for index, encoding in zip(list(answers), encodings, strict=True):
            border = _first_after(encoding, len(anchor))
            if border and _start(encoding, border) >= len(anchor):
                del answers[index]
                yield index, encoding.ids[border:]


def _first_after(encoding: Any, border: int) -> int:
    """The first token that holds anything behind character `border`; tokens of white space may have no width."""
    return next((index for index, (_, end) in enumerate(encoding.offsets) if end > border), len(encoding))


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
