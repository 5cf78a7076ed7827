"""Read a model's `config.json` without transformers, and check its sizes before a model is built from it.

A file of a few bytes can describe a model of 20,000 layers, which takes minutes and gigabytes to build before the first
missing weight is noticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ModelError

MAX_BYTES = 16 << 20
MAX_DEPTH = 32
BOUNDS = {
    "frequencies": (1 << 63, r"theta|base|seed|length"),
    "windows": (1 << 31, r"batch|window|cache|buffer"),
    "tokens": (1 << 24, r"vocab"),
    "layers": (2_048, r"layers?$|blocks$"),
    "heads": (16_384, r"heads?$|head_(dim|size|width)$|d_head$|d_kv$"),
    "experts": (65_536, r"experts$"),
    "width": (1 << 20, r"(size|dim|width|rank|embd|inner|d_model|d_ff)$"),
    "positions": (1 << 27, r"position|ctx|seq_len|context"),
}
"""Quantity -> its limit, and a pattern for the keys that hold it, whatever else families put into their names. The
first match of a key applies. Each limit is at least ten times the value of any published model."""
OTHERS = 1 << 31
"""Limit for all other integers: no size is that large."""
IN_LISTS = 1 << 24
"""Limit for integers in lists: some are repeat counts, as in gpt_neo's attention_types."""

_BOUNDS = [(limit, re.compile(pattern)) for limit, pattern in BOUNDS.values()]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the values of `config.json`; ModelError if it is missing, not JSON, or over a limit."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"The model folder {folder} has no config.json.",
            fix="This folder holds an adapter: use its base model, and load the adapter with PEFT."
            if (folder / "adapter_config.json").is_file()
            else "Use the folder of a Hugging Face causal LM.",
        )
    if path.stat().st_size > MAX_BYTES:
        raise _refused(path, f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as err:
        raise _refused(path, f"is nested more than {MAX_DEPTH} levels deep") from err
    except (OSError, ValueError) as err:
        raise ModelError(
            "The model's config.json is not valid JSON.", where=str(path), fix="Download it again."
        ) from err
    if not isinstance(values, dict):
        raise ModelError("The model's config.json contains no settings.", where=str(path), fix="Download it again.")
    for key, value, limit in _numbers(values, path):
        if value > limit:
            shown = str(value) if value < 1 << 63 else "a number of more than 63 bits"
            raise _refused(path, f"has {key}={shown}, above the limit of {limit:,}")
    return values


def _limit(key: str) -> int:
    return next((limit for limit, pattern in _BOUNDS if pattern.search(key)), OTHERS)


def _numbers(value: Any, path: Path, key: str = "", limit: int = OTHERS, depth: int = 0) -> Iterator[Any]:
    """Yield every number, at any depth, with the key above it and that key's limit."""
    if depth > MAX_DEPTH:
        raise _refused(path, f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part, path, key, min(limit, IN_LISTS), depth + 1)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, path, name, _limit(name), depth + 1)
    elif isinstance(value, int) or (isinstance(value, float) and limit < IN_LISTS):
        yield key, value, limit


def _refused(path: Path, what: str) -> ModelError:
    return ModelError(f"The model's config.json {what}.", where=str(path), fix="Check the source of the model.")
