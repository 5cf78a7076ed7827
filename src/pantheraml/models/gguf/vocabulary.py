"""A fast tokenizer as GGUF keys: byte-level BPE ("gpt2") or BPE over SentencePiece's alphabet ("llama").

llama.cpp splits text by built-in rules that it knows by name. The name is found from the tokenizer's own rules; unknown
rules are an error, because the file would load and read text as other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.gguf.kinds import SAVE_MERGED

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""llama.cpp's token types."""

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS, _SYMBOLS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CASELESS + "|" + _WORDS + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _CASELESS + "|" + _WORDS + r"|\p{N}" + _SYMBOLS + _SPACES
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = _CASED[0] + "|" + _CASED[1] + r"|\p{N}" + _SLASHED + _SPACES
_GPT4O = f"{_CASED[0]}{_CASELESS}?|{_CASED[1]}{_CASELESS}?" + r"|\p{N}{1,3}" + _SLASHED + _SPACES
_BYTE_LEVEL, _DIGITS = "byte level", "digits"
_SPLITS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_BYTE_LEVEL,), False): "gpt-2",
    ((_DIGITS, _BYTE_LEVEL), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
}
"""(rules that split text, whether a whole word in the vocabulary skips the merges) -> llama.cpp's name."""
_SPACE = "\u2581"


@dataclass(frozen=True)
class Vocabulary:
    model: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    space_prefix: bool


def read_vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Return the vocabulary of a fast tokenizer, padded to the `size` of the model's embedding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"A {type(tokenizer).__name__} cannot be converted to GGUF: it is no fast tokenizer.",
            fix="Use the tokenizer that from_pretrained returned.",
        )
    spec: dict[str, Any] = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise _unsupported(f"its model is {model['type']}, not BPE")
    tokens, types = _tokens(spec, size, unknown=model.get("unk_token"))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    if not merges:
        raise _unsupported("it has no merges")
    if model.get("byte_fallback"):
        return Vocabulary("llama", "default", tokens, types, [], _scores(tokens, merges), _space_prefix(spec))
    return Vocabulary("gpt2", _split_name(spec), tokens, types, merges, [], space_prefix=False)


def _tokens(spec: Mapping[str, Any], size: int, unknown: str | None) -> tuple[list[str], list[int]]:
    names: dict[int, str] = {number: text for text, number in spec["model"]["vocab"].items()}
    kinds = {number: BYTE if re.fullmatch("<0x[0-9A-F]{2}>", text) else NORMAL for number, text in names.items()}
    if not spec["model"].get("byte_fallback"):
        kinds = dict.fromkeys(kinds, NORMAL)
    for token in spec["added_tokens"]:
        names[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    kinds |= {number: UNKNOWN for number, text in names.items() if unknown is not None and text == unknown}
    if max(names) >= size:
        raise UnsupportedModelError(
            f"The tokenizer has a token {max(names)}, but the model's embedding only {size} rows.",
            fix="Use the tokenizer of this model.",
        )
    padded = [names.get(number, f"[PAD{number}]") for number in range(size)]
    return padded, [kinds.get(number, UNUSED) for number in range(size)]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores by which llama.cpp merges in the tokenizer's order: it joins the pair whose result scores highest,
    the tokenizer the pair whose merge is listed first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks[token]) if token in ranks else -1e6 for token in tokens]


def _space_prefix(spec: Mapping[str, Any]) -> bool:
    """Return whether text gets a leading space; an error unless spaces become SentencePiece's."""
    steps = [*_steps(spec.get("normalizer"), "normalizers"), *_steps(spec.get("pre_tokenizer"), "pretokenizers")]
    meta = [step for step in steps if step["type"] == "Metaspace"]
    replaced = any(
        step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _SPACE for step in steps
    )
    known = ("Prepend", "Replace", "Metaspace", "Split")
    odd = [step["type"] for step in steps if step["type"] not in known]
    if odd or not (meta or replaced):
        raise _unsupported(f"of its step {odd[0]}" if odd else f"it does not replace spaces by {_SPACE}")
    prepended = any(step["type"] == "Prepend" and step["prepend"] == _SPACE for step in steps)
    return prepended or any(step.get("prepend_scheme", "always") != "never" for step in meta)


def _split_name(spec: Mapping[str, Any]) -> str:
    rules: list[str] = []
    for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Split" and "Regex" in step["pattern"]:
            rules.append(step["pattern"]["Regex"])
        elif step["type"] == "Digits" and step.get("individual_digits"):
            rules.append(_DIGITS)
        elif step["type"] == "ByteLevel":
            if step.get("add_prefix_space"):
                raise _unsupported("it puts a space before texts")
            rules += [_BYTE_LEVEL] if step.get("use_regex", True) else []
        else:
            raise _unsupported(f"of its step {step['type']}")
    name = _SPLITS.get((tuple(rules), bool(spec["model"].get("ignore_merges"))))
    if name is None:
        raise _unsupported("llama.cpp has no name for the rules by which it splits text")
    return name


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[name]:
            yield from _steps(step, name)
    else:
        yield part


def _unsupported(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The tokenizer cannot be converted to GGUF: {reason}.",
        fix=SAVE_MERGED,
    )


def add_vocabulary(writer: Any, tokenizer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.space_prefix)
    else:
        writer.add_token_merges(vocabulary.merges)
    special = {
        writer.add_bos_token_id: tokenizer.bos_token_id, writer.add_eos_token_id: tokenizer.eos_token_id,
        writer.add_unk_token_id: tokenizer.unk_token_id, writer.add_pad_token_id: tokenizer.pad_token_id,
    }  # fmt: skip
    for add, token in special.items():
        if token is not None:
            add(token)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)
