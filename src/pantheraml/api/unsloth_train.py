"""`unsloth_train`: train with TRL's SFTTrainer by one call, as scripts written for Unsloth do."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, MissingExtraError


def unsloth_train(trainer: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the statistics of `trainer.train(...)`, or of an SFTTrainer made from keywords.

    `unsloth_train(trainer)` trains a trainer of transformers or TRL; further arguments are those of its `train`.
    `unsloth_train(model=, tokenizer=, train_dataset=, ...)` makes the trainer: keywords are arguments of SFTTrainer, or
    fields of SFTConfig such as max_steps and learning_rate. Unsloth itself is not needed.
    """
    log.start_for_scripts()
    if trainer is None:
        return _make_trainer(kwargs).train()
    if not callable(getattr(trainer, "train", None)) or "train_dataset" in kwargs:
        raise ConfigError(
            f"unsloth_train got a {type(trainer).__name__} as its trainer.",
            fix="Pass a trainer, or name the parts: unsloth_train(model=..., tokenizer=..., train_dataset=...).",
        )
    return trainer.train(*args, **kwargs)


def _make_trainer(given: dict[str, Any]) -> Any:
    try:
        # here: most scripts pass a trainer that they made
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer
    except ImportError as err:
        raise MissingExtraError("unsloth_train needs TRL, which is not installed.", fix="pip install trl") from err
    for name in ("model", "train_dataset"):
        if given.get(name) is None:
            raise ConfigError(
                f"unsloth_train needs {name}=, or a trainer as its first argument.",
                fix="Pass a trainer, or the arguments of SFTTrainer: unsloth_train(model=..., train_dataset=...).",
            )
    parts = dict(given)
    if parts.get("tokenizer") is not None:
        if parts.get("processing_class") not in (None, parts["tokenizer"]):
            raise ConfigError("unsloth_train got tokenizer and processing_class, which disagree.", fix="Pass one.")
        parts["processing_class"] = parts.pop("tokenizer")
    parts.pop("tokenizer", None)
    accepted = inspect.signature(inspect.unwrap(SFTTrainer.__init__)).parameters
    settings = {name: parts.pop(name) for name in list(parts) if name not in accepted}
    fields = {field.name for field in dataclasses.fields(SFTConfig) if field.init} | {"max_seq_length"}
    unknown = sorted(set(settings) - fields)
    if unknown:
        raise ConfigError(
            f"unsloth_train got {unknown[0]}=, which neither SFTTrainer nor SFTConfig has.", fix="Check its spelling."
        )
    if settings and parts.get("args") is not None:
        raise ConfigError(
            f"unsloth_train got args= and {next(iter(settings))}=, which belongs in it.", fix="Set it in the args."
        )
    if settings:
        if "max_seq_length" in settings:
            settings["max_length"] = settings.pop("max_seq_length")
        parts["args"] = SFTConfig(**settings)
    return SFTTrainer(**parts)
