"""A model's `config.json`, read without transformers and held to bounds before anything is built from it.

A file of a few bytes can describe a model of 20,000 layers, which takes minutes and gigabytes to build before the first
weight is missed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ModelError

MAX_BYTES = 16 << 20
MAX_DEPTH = 32
BOUNDS = {
    2_048: ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"),
    16_384: ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"),
    65_536: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    1 << 20: ("hidden_size", "intermediate_size", "n_embd", "d_model", "d_ff", "ffn_dim"),
    1 << 24: ("vocab_size",),
}
"""Largest value -> the keys that it holds for, under the names that families give them. Each is at least ten times what
any published model has."""

_LIMITS = {name: limit for limit, names in BOUNDS.items() for name in names}


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The values of `config.json`; ModelError if it is not there, not JSON, or describes an absurd model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(
            f"The model folder {folder} has no config.json.",
            todo="It is an adapter's: give its base model, and load the adapter onto that with PEFT."
            if (folder / "adapter_config.json").is_file()
            else "Give the folder of a Hugging Face causal LM.",
        )
    if path.stat().st_size > MAX_BYTES:
        raise _refused(path, f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as err:
        raise _refused(path, f"is nested more than {MAX_DEPTH} levels deep") from err
    except (OSError, ValueError) as err:
        raise ModelError("The model's config.json is not valid JSON.", where=str(path), todo="Get it again.") from err
    if not isinstance(values, dict):
        raise ModelError("The model's config.json holds no settings.", where=str(path), todo="Get it again.")
    for key, value in _numbers(values, path, 0):
        if value > _LIMITS.get(key, value):
            raise _refused(path, f"has {key}={value}, more than the {_LIMITS[key]:,} that are allowed")
    return values


def _numbers(value: Any, path: Path, depth: int) -> Iterator[tuple[str, int]]:
    """Every key with a whole number, at any depth."""
    if depth > MAX_DEPTH:
        raise _refused(path, f"is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for part in value:
            yield from _numbers(part, path, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, int):
                yield key, part
            else:
                yield from _numbers(part, path, depth + 1)


def _refused(path: Path, what: str) -> ModelError:
    return ModelError(f"The model's config.json {what}.", where=str(path), todo="Check where the model comes from.")
