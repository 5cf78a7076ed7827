"""Which keys of a configuration are paths, and whether these are where an operator allows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pantheraml.base.roots import require_allowed
from pantheraml.specs.train import TrainConfig

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """`model` or `owner/model`, as the hub spells them."""
    return _HUB_NAME.fullmatch(name) is not None


def path_keys(config: TrainConfig) -> dict[str, str]:
    """Key -> value, for every key whose value is a local path. A model's name that is no folder here is the hub's."""
    model, data = config.model, config.data
    found = {
        "data.path": data.path,
        "data.eval_path": data.eval_path,
        "data.cache_dir": data.cache_dir,
        "model.path": _local(model.path),
        "model.tokenizer": None if model.tokenizer is None else _local(model.tokenizer),
    }
    return {key: value for key, value in found.items() if value is not None}


def check_roots(config: TrainConfig, roots: Sequence[Path] | None = None) -> None:
    """ConfigError, naming the key, unless every path of `config` is inside one of `roots` (None: the operator's)."""
    for key, value in path_keys(config).items():
        require_allowed(value, key=key, roots=roots)


def _local(name: str) -> str | None:
    return None if is_hub_name(name) and not Path(name).exists() else name
