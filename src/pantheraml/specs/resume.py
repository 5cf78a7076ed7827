"""What may change between two starts of one run, and making a configuration independent of the current folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.errors import CheckpointError, ConfigError
from pantheraml.specs.config_file import all_keys, nearest_key
from pantheraml.specs.train import StabilityConfig, TrainConfig

# A resumed run gives the numbers it would have given without a stop. These keys do not enter those numbers, or say only
# how to watch, save or meet what goes wrong; any other change would make it another run.
MAY_CHANGE = frozenset(
    {
        *("device", "faults", "train.micro_batch_size"),
        *("train.activation_checkpointing", "train.compile", "train.fp8_layouts"),
        *("train.eval_every_steps", "train.early_stopping_patience", "train.log_every_steps"),
        *("data.path", "data.eval_path", "data.eval_fraction", "data.workers", "data.cache_dir", "data.on_bad_row"),
    }
)
SECTIONS_THAT_MAY_CHANGE = frozenset({"parallel", "stability", "checkpoint", "report"})
WHERE_WEIGHTS_ARE = ("model.device_map", "model.max_memory")
# Of those sections: several processes equal one only where gradients are summed over all tokens; and clipping is a part
# of every step.
MAY_NOT_CHANGE = frozenset(
    {
        *("parallel.aggregation", "parallel.aggregation_weights"),
        *(f"stability.{name}" for name in StabilityConfig.model_fields if name.startswith("clip")),
    }
)
LENGTH = frozenset({"train.max_steps", "train.epochs"})
"""A longer run is the same one only if the learning rate does not go by its length."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs between two starts of a run."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.before!r}, is {self.after!r}"


def check_resumable(old: TrainConfig, new: TrainConfig) -> list[Change]:
    """The changes that only `checkpoint.allow_change` of `new` lets pass; CheckpointError if it does not.

    (Whether the data's content is the same shows later.)
    """
    _check_names(new.checkpoint.allow_change)
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    changed = [
        Change(key, before.get(key), after.get(key))
        for key in sorted(what_makes_the_numbers(old).keys() | what_makes_the_numbers(new).keys())
        if before.get(key) != after.get(key)
    ]
    refused = [change for change in changed if not is_allowed(change.key, new.checkpoint.allow_change)]
    if refused:
        insist = " ".join(f"--allow-change {change.key}" for change in refused)
        why = ""
        if any(change.key in LENGTH for change in refused):
            why = f" (Under train.schedule={new.train.schedule} learning rates go by the run's length.)"
        raise CheckpointError(
            f"The run cannot be continued exactly with another configuration: {'; '.join(map(str, refused))}.{why}",
            todo=f"Undo the change, start a new run in another folder, or insist with {insist}.",
        )
    return changed


def what_makes_the_numbers(config: TrainConfig) -> dict[str, Any]:
    """The settings that a run's numbers come from, by their whole names."""
    free = LENGTH if config.train.schedule == "constant" else frozenset()
    return {key: value for key, value in _flat(config.to_dict()).items() if key not in free and not _may_change(key)}


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Whether `key` (`train.seed`, or a section as a whole) is among keys and sections that may change."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in allowed)


def _may_change(key: str) -> bool:
    if is_allowed(key, WHERE_WEIGHTS_ARE):
        return True
    return key in MAY_CHANGE or (key.partition(".")[0] in SECTIONS_THAT_MAY_CHANGE and key not in MAY_NOT_CHANGE)


def _check_names(allowed: Sequence[str]) -> None:
    known = {".".join(key) for key in all_keys()}
    for name in allowed:
        if name not in known:
            near = nearest_key(tuple(name.split(".")))
            hint = f"Did you mean `{near}`?" if near else "`pantheraml schema` lists every key."
            raise ConfigError(f"--allow-change takes a key or a section of the configuration, not {name!r}.", todo=hint)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """The same configuration, usable from any folder. What is not there (a hub name, say) stays as typed."""

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
