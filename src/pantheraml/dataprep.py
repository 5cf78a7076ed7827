"""`SyntheticDataKit`, which Unsloth scripts import from here: not supported, with an error that says so."""

from __future__ import annotations

from typing import Any

from pantheraml.base.errors import ConfigError


def __getattr__(name: str) -> Any:
    if name != "SyntheticDataKit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ConfigError(
        "pantheraml does not support SyntheticDataKit, which makes data with a vLLM server.",
        fix="Make the data with synthetic-data-kit itself, and train on its files.",
    )
