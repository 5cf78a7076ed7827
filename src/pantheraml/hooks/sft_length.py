"""`max_seq_length` of a loaded model as the default of `SFTConfig.max_length`, and arguments by their old names.

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
from pantheraml.hooks.old_trl_names import prepare_config_arguments, rename_trainer_arguments
from pantheraml.hooks.sft_texts import TEXT_FIELD_SET, no_rows
from pantheraml.models.causal_lm import fast_model

logger = log.get(__name__)

_DEFAULTED = "_max_length_is_default"
"""Attribute of a config: whether `max_length` was left out; missing if the config was made without the patch."""

_made_by_trainer: ContextVar[tuple[int | None, dict[str, Any]] | None] = ContextVar(
    "max_seq_length, and moved arguments, for the config that SFTTrainer makes itself", default=None
)


def _note_default(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_config(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare_config_arguments(kwargs)
        init(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        setattr(self, _DEFAULTED, "max_length" not in given)
        setattr(self, TEXT_FIELD_SET, "dataset_text_field" in given)
        made = _made_by_trainer.get()
        if made is not None:
            complete_config(self, *made)

    return init_config


def _with_model_length(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
        model = fast_model(args[0] if args else kwargs.get("model"))
        moved = {} if model is None else rename_trainer_arguments(kwargs)
        bound = signature.bind_partial(self, *args, **kwargs)
        config = bound.arguments.get("args")
        length = None if model is None else model.max_seq_length
        if hasattr(config, "max_length"):
            complete_config(config, length, moved)
        if model is not None and getattr(bound.arguments.get("data_collator"), "reads_rows", False):
            from pantheraml.hooks.vision_sft import prepare_vision_arguments  # needs datasets and Pillow

            prepare_vision_arguments(bound.arguments, length=_set_length(config))
        # without args, or with plain TrainingArguments, the trainer makes an SFTConfig
        token = _made_by_trainer.set((length, moved))
        try:
            init(*bound.args, **bound.kwargs)
        except StopIteration as err:  # the trainer looks at the first row
            raise no_rows("train") from err
        finally:
            _made_by_trainer.reset(token)

    return init_trainer


def _set_length(config: Any) -> int | None:
    """Return the `max_length` that the script has set; None if it has not."""
    return None if getattr(config, _DEFAULTED, True) else config.max_length


def complete_config(config: Any, length: int | None, moved: dict[str, Any]) -> None:
    """Set arguments that moved from the trainer to `config`, and a default `max_length`, if `length` is known."""
    for name, value in moved.items():
        setattr(config, name, value)
    if "max_length" in moved:
        setattr(config, _DEFAULTED, False)
    if "dataset_text_field" in moved:
        setattr(config, TEXT_FIELD_SET, True)
    if length is not None:
        _resolve(config, length)


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
