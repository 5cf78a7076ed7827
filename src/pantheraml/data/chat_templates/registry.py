"""Chat formats by name."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pantheraml.base.errors import ConfigError
from pantheraml.data.chat_templates import jinja_formats, turn_formats
from pantheraml.data.chat_templates.turn_format import TurnFormat


@dataclass(frozen=True)
class ChatFormat:
    template: str
    """Jinja; uses the variable `end_of_turn`."""
    end_of_turn: str | None
    """The token that ends an assistant turn; None: the tokenizer's eos token."""


_TURNS: dict[str, TurnFormat] = {
    "chatml": turn_formats.CHATML,
    "llama-3": turn_formats.LLAMA_3,
    "llama-3.1": turn_formats.LLAMA_3_1,
    "llama-3.2": turn_formats.LLAMA_3_1,
    "llama-3.3": turn_formats.LLAMA_3_1,
    "gemma": turn_formats.GEMMA,
    "gemma-2": turn_formats.GEMMA,
    "gemma-3": turn_formats.GEMMA_3,
    "gemma-3n": turn_formats.GEMMA_3N,
    "phi-3": turn_formats.PHI_3,
    "phi-3.5": turn_formats.PHI_3,
    "phi-4": turn_formats.PHI_4,
    "mistral": turn_formats.MISTRAL,
    "llama": turn_formats.LLAMA_2,
    "zephyr": turn_formats.ZEPHYR,
    "vicuna": turn_formats.VICUNA,
    "vicuna_old": turn_formats.VICUNA_OLD,
    "alpaca": turn_formats.ALPACA,
    "unsloth": turn_formats.UNSLOTH,
    "starling": turn_formats.STARLING,
    "lfm-2": turn_formats.LFM2,
    "lfm-2.5": turn_formats.LFM2,
    "yi-chat": turn_formats.CHATML,
}
_JINJA: dict[str, tuple[str, str]] = {
    "qwen-2.5": (jinja_formats.QWEN_2_5, "<|im_end|>"),
    "qwen-3": (jinja_formats.QWEN_3, "<|im_end|>"),
    "qwen3-instruct": (jinja_formats.QWEN_3_INSTRUCT, "<|im_end|>"),
    "qwen3-thinking": (jinja_formats.QWEN_3_THINKING, "<|im_end|>"),
    "gemma-4": (jinja_formats.GEMMA_4, "<turn|>"),
    "gemma-4-thinking": (jinja_formats.GEMMA_4_THINKING, "<turn|>"),
    "gpt-oss": (jinja_formats.GPT_OSS, "<|return|>"),
}
KNOWN_NAMES = (*_TURNS, *_JINJA)


def find_format(name: str) -> ChatFormat:
    """Return the format; case, spaces, `-`, `_` and `.` do not matter (llama3.1, llama-31). ConfigError if unknown."""
    known = {_key(each): each for each in KNOWN_NAMES}
    found = known.get(_key(name), "")
    if found in _TURNS:
        turns = _TURNS[found]
        return ChatFormat(turns.to_jinja(), turns.end_of_turn)
    if found in _JINJA:
        return ChatFormat(*_JINJA[found])
    closest = difflib.get_close_matches(_key(name), known, n=len(known), cutoff=0.0)
    raise ConfigError(
        f"There is no chat template named {name!r}.",
        fix=f"Use one of: {', '.join(known[key] for key in closest)}. Or pass a (template, eos token) pair or a "
        "Jinja template.",
    )


def _key(name: str) -> str:
    return re.sub(r"[\s._-]", "", name.lower())
