"""`max_seq_length` of a loaded model as the default of `SFTConfig.max_length`.

`SFTTrainer` truncates rows to `max_length`, which is 1024 unless it is set; a script that loads its model with
`max_seq_length=4096` expects 4096. A `max_length` that the script sets takes precedence. Whether it is set is known
only of configs made while the patch is in place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from pantheraml.base import log
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.models.causal_lm import fast_model

logger = log.get(__name__)

_DEFAULTED = "_max_length_is_default"
"""Attribute of a config: whether `max_length` was left out; missing if the config was made without the patch."""

_made_by_trainer: ContextVar[int | None] = ContextVar("max_length of configs that SFTTrainer makes", default=None)


def _note_default(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_config(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        is_default = "max_length" not in signature.bind(self, *args, **kwargs).arguments
        setattr(self, _DEFAULTED, is_default)
        length = _made_by_trainer.get()
        if is_default and length is not None:
            _carry_over(self, length)

    return init_config


def _with_model_length(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        model, config = fast_model(given.get("model")), given.get("args")
        length = None if model is None else model.max_seq_length
        if length is not None and hasattr(config, "max_length"):
            _resolve(config, length)
        token = _made_by_trainer.set(length)  # without args, or with plain TrainingArguments, it makes an SFTConfig
        try:
            init(self, *args, **kwargs)
        finally:
            _made_by_trainer.reset(token)

    return init_trainer


def _resolve(config: Any, length: int) -> None:
    if getattr(config, _DEFAULTED, False):
        _carry_over(config, length)
    elif config.max_length is not None and config.max_length < length:
        logger.warning(
            "rows are truncated to SFTConfig's max_length=%d, less than the model's max_seq_length=%d",
            config.max_length,
            length,
        )


def _carry_over(config: Any, length: int) -> None:
    if config.max_length != length:
        logger.info("SFTConfig.max_length is %d, from max_seq_length; TRL's default is %s", length, config.max_length)
        config.max_length = length


CONFIG_LENGTH = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_config",
    class_name="SFTConfig",
    name="__init__",
    make=_note_default,
    fallback="max_seq_length is not the default of SFTConfig's max_length, which must be set",
    required=False,
)
TRAINER_LENGTH = LibraryPatch(
    library="trl",
    versions=">=1.15,<1.17",
    module="trl.trainer.sft_trainer",
    class_name="SFTTrainer",
    name="__init__",
    make=_with_model_length,
    fallback="max_seq_length is not the default of SFTConfig's max_length, which must be set",
    required=False,
)
