"""Settings that may change when a run is resumed; also makes the paths of a config absolute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import CheckpointError, ConfigError
from pantheraml.specs.config_file import all_keys, nearest_key
from pantheraml.specs.train import StabilityConfig, TrainConfig

# A resumed run gives the same numbers as an uninterrupted one. These keys do not affect the numbers, or only affect
# logging, saving and error handling; a change of any other key makes it a different run.
CHANGEABLE_KEYS = frozenset(
    {
        *("device", "train.micro_batch_size"),
        *("train.activation_checkpointing", "train.compile"),
        *("train.eval_every_steps", "train.early_stopping_patience", "train.log_every_steps"),
        *("data.path", "data.eval_path", "data.eval_fraction", "data.workers", "data.cache_dir", "data.on_bad_row"),
    }
)
CHANGEABLE_SECTIONS = frozenset({"parallel", "stability", "checkpoint", "report"})
PLACEMENT_KEYS = ("model.device_map", "model.max_memory")
# Exceptions in these sections: several processes equal one only with aggregation=mean, and clipping affects every step.
FIXED_KEYS = frozenset(
    {
        *("parallel.aggregation", "parallel.aggregation_weights"),
        *(f"stability.{name}" for name in StabilityConfig.model_fields if name.startswith("clip")),
    }
)
LENGTH = frozenset({"train.max_steps", "train.epochs"})
"""May change only if the learning rate schedule does not depend on the length of the run."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the one at the last start."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r}, is {self.after!r}"


def check_resumable(old: TrainConfig, new: TrainConfig) -> list[Change]:
    """Return the changes permitted only by `checkpoint.allow_change` of `new`; CheckpointError for any other.

    The content of the data is compared later.
    """
    _check_names(new.checkpoint.allow_change)
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    changed = [
        Change(key, before.get(key), after.get(key))
        for key in sorted(reproducibility_settings(old).keys() | reproducibility_settings(new).keys())
        if before.get(key) != after.get(key)
    ]
    refused = [change for change in changed if not is_allowed(change.key, new.checkpoint.allow_change)]
    if refused:
        flags = " ".join(f"--allow-change {change.key}" for change in refused)
        why = ""
        if any(change.key in LENGTH for change in refused):
            why = f" (With train.schedule={new.train.schedule} the learning rate depends on the run's length.)"
        raise CheckpointError(
            f"The run cannot be resumed exactly with a different configuration: {'; '.join(map(str, refused))}.{why}",
            fix=f"Undo the change, start a new run in another folder, or allow it with {flags}.",
        )
    return changed


def reproducibility_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that determine a run's numbers, by full key."""
    free = LENGTH if config.train.schedule == "constant" else frozenset()
    return {key: value for key, value in _flat(config.to_dict()).items() if key not in free and not _may_change(key)}


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Return True if `key` (`train.seed`, or a whole section) is covered by the `allowed` keys and sections."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in allowed)


def _may_change(key: str) -> bool:
    if is_allowed(key, PLACEMENT_KEYS):
        return True
    return key in CHANGEABLE_KEYS or (key.partition(".")[0] in CHANGEABLE_SECTIONS and key not in FIXED_KEYS)


def _check_names(allowed: Sequence[str]) -> None:
    known = {".".join(key) for key in all_keys()}
    for name in allowed:
        if name not in known:
            near = nearest_key(tuple(name.split(".")))
            hint = f"Did you mean `{near}`?" if near else "`pantheraml schema` lists every key."
            raise ConfigError(f"--allow-change takes a key or section of the configuration, not {name!r}.", fix=hint)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the config with absolute paths, usable from any folder. Names that are not local (hub names) stay."""

    def absolute(path: str | None) -> str | None:
        return path if path is None or not Path(path).exists() else str(Path(path).absolute())

    model, data = config.model, config.data
    return config.model_copy(
        update={
            "model": model.model_copy(update={"path": absolute(model.path), "tokenizer": absolute(model.tokenizer)}),
            "data": data.model_copy(
                update={
                    "path": absolute(data.path),
                    "eval_path": absolute(data.eval_path),
                    "cache_dir": None if data.cache_dir is None else str(Path(data.cache_dir).absolute()),
                }
            ),
        }
    )
