"""Path keys of a configuration, and the check that they are inside the allowed roots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pantheraml.base.roots import require_allowed
from pantheraml.specs.train import TrainConfig

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Return True for `model` or `owner/model`."""
    return _HUB_NAME.fullmatch(name) is not None


def path_keys(config: TrainConfig) -> dict[str, str]:
    """Map key -> value for every key that is a local path. A model name that is not a local folder is a hub name."""
    model, data = config.model, config.data
    paths = {
        "data.path": data.path,
        "data.eval_path": data.eval_path,
        "data.cache_dir": data.cache_dir,
        "model.path": _local(model.path),
        "model.tokenizer": None if model.tokenizer is None else _local(model.tokenizer),
    }
    return {key: value for key, value in paths.items() if value is not None}


def check_roots(config: TrainConfig, roots: Sequence[Path] | None = None) -> None:
    """ConfigError unless every path of `config` is inside one of `roots` (None: PANTHERAML_ALLOWED_ROOTS)."""
    for key, value in path_keys(config).items():
        require_allowed(value, key=key, roots=roots)


def _local(name: str) -> str | None:
    return None if is_hub_name(name) and not Path(name).exists() else name
