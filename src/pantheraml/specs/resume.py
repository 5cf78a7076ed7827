"""What may change between two starts of one run, and making a configuration independent of the current folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pantheraml.base.errors import CheckpointError
from pantheraml.specs.train import TrainConfig

# A resumed run gives the numbers it would have given without a stop. These keys do not enter those numbers, or say only
# when to stop, watch or save; any other change would make it another run.
MAY_CHANGE = frozenset(
    {
        *("device", "train.max_steps", "train.epochs", "train.micro_batch_size", "train.activation_checkpointing"),
        *("train.compile", "train.eval_every_steps", "train.early_stopping_patience", "train.log_every_steps"),
        *("data.path", "data.eval_path", "data.eval_fraction", "data.workers", "data.cache_dir", "data.on_bad_row"),
    }
)
SECTIONS_THAT_MAY_CHANGE = frozenset({"parallel", "stability", "checkpoint", "report"})


def check_resumable(old: TrainConfig, new: TrainConfig) -> None:
    """Raise if `new` cannot continue what `old` began. (Whether the data's content is the same shows later.)"""
    before, after = _flat(old.to_dict()), _flat(new.to_dict())
    changed = [
        f"{key} was {before.get(key)!r}, is {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
        and key not in MAY_CHANGE
        and key.partition(".")[0] not in SECTIONS_THAT_MAY_CHANGE
    ]
    if changed:
        raise CheckpointError(
            f"The run cannot be continued exactly with another configuration: {'; '.join(changed)}.",
            todo="Undo the change, or start a new run in another folder.",
        )


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
