"""Arguments that TRL and transformers have renamed, as scripts written for older versions pass them.

    SFTTrainer(tokenizer=...)                                            processing_class
    SFTTrainer(max_seq_length=, dataset_text_field=, packing=, ...)      fields of SFTConfig
    SFTConfig(max_seq_length=)                                           max_length
    SFTConfig(warmup_ratio=)                                             warmup_steps, below 1
    SFTConfig(evaluation_strategy=)                                      eval_strategy

Each is translated, with one warning. An old and a new name that disagree are an error.
"""

from __future__ import annotations

from typing import Any

import torch

from pantheraml.base import log
from pantheraml.base.errors import ConfigError

logger = log.get(__name__)

CONFIG_NAMES = {
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
}
"""Old names of fields of training configs, and the present ones."""

MOVED_TO_CONFIG = ("max_seq_length", "dataset_text_field", "packing", "dataset_num_proc", "eval_packing")
"""Old arguments of SFTTrainer that are fields of SFTConfig now."""


def prepare_config_arguments(arguments: dict[str, Any], owner: str = "SFTConfig") -> None:
    """Give old arguments of a training config their present names, and a CPU its precision, in place."""
    log.start_for_scripts()  # a config may be made before a model is loaded
    if (ratio := arguments.get("warmup_ratio") or 0) >= 1:
        raise ConfigError(  # as warmup_steps it would be a number of steps
            f"{owner} got warmup_ratio={ratio:g}, which is not a fraction of the run.", fix="Set warmup_steps."
        )
    for old, new in CONFIG_NAMES.items():
        if old in arguments:
            _rename(arguments, old, new, owner)
    _default_to_float32_on_cpus(arguments, owner)


def _default_to_float32_on_cpus(arguments: dict[str, Any], owner: str) -> None:
    """Set the config's precision where there is no accelerator: TRL's default is bf16, which it then refuses."""
    asked = any(arguments.get(name) is not None for name in ("use_cpu", "bf16", "fp16"))
    if not asked and not torch.accelerator.is_available():
        arguments |= {"use_cpu": True, "bf16": False}
        logger.info("%s: no GPU is visible: training on the CPU, without bf16 autocast", owner)


def rename_tokenizer(arguments: dict[str, Any], owner: str) -> None:
    """Give a trainer's `tokenizer` its present name, in place."""
    if "tokenizer" in arguments:
        _rename(arguments, "tokenizer", "processing_class", owner)


def rename_trainer_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Give old arguments of SFTTrainer their present names, in place; return those that belong to its config."""
    rename_tokenizer(arguments, "SFTTrainer")
    moved = {name: arguments.pop(name) for name in MOVED_TO_CONFIG if name in arguments}
    if moved:
        logger.warning("SFTTrainer's %s are arguments of SFTConfig in this version of TRL", ", ".join(moved))
    return {CONFIG_NAMES.get(name, name): value for name, value in moved.items() if value is not None}


def _rename(arguments: dict[str, Any], old: str, new: str, owner: str) -> None:
    value = arguments.pop(old)
    known = arguments.get(new)
    if known is not None and value is not None and known is not value and known != value:
        raise ConfigError(f"{owner} got {old} and {new}, which disagree.", fix=f"Remove {old}.")
    logger.warning("%s's %s is called %s in this version", owner, old, new)
    if value is not None:
        arguments[new] = value
