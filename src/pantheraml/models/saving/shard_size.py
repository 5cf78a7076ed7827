"""Parse sizes such as "5GB", as transformers' `max_shard_size` takes them."""

from __future__ import annotations

from huggingface_hub.serialization._base import parse_size_to_int

from pantheraml.base.errors import ConfigError


def parse_size(size: int | str) -> int:
    try:
        parsed = size if isinstance(size, int) else parse_size_to_int(size)
    except ValueError as err:
        raise ConfigError(f"max_shard_size={size!r} is not a size: {err}", fix='Use a form such as "5GB".') from err
    if parsed <= 0:
        raise ConfigError(f"max_shard_size={size!r} is not a size.", fix='Use a form such as "5GB".')
    return parsed
