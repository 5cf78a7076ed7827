"""Configs and trainers of TRL besides SFT's, as scripts for older versions and for Unsloth use them.

    ...Config(warmup_ratio=, evaluation_strategy=, max_seq_length=)   today's names
    ...Config(max_prompt_length=)           dropped: TRL no longer truncates prompts
    GRPOConfig(vllm_sampling_params=)       top_p, top_k, min_p, ... of the config
    GRPOConfig(use_vllm=True)               False where vLLM is not installed
    GRPOConfig with a batch that holds no whole group of completions   per_device_train_batch_size is raised
    ...Trainer(tokenizer=), DPOTrainer(beta=, max_length=)             processing_class, fields of the config
    from trl import ORPOConfig, ORPOTrainer                            trl.experimental

Each is translated, with one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pantheraml.base import log
from pantheraml.base.env import launched_rank
from pantheraml.base.errors import ConfigError
from pantheraml.hooks.library_patch import LibraryPatch
from pantheraml.hooks.old_trl_names import prepare_config_arguments, rename_tokenizer
from pantheraml.models.sampling_params import read_sampling_params

logger = log.get(__name__)

_VERSIONS = ">=1.15,<1.17"
_FALLBACK = "arguments must have the names that this version of TRL uses"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SERVED_BY_TRAINER = ("max_tokens", "n")
"""Settings of a SamplingParams that GRPOConfig has under names of its own (max_completion_length, num_generations)."""

EXPERIMENTAL: Mapping[str, str] = {
    f"{kind}{part}": f"trl.experimental.{module}"
    for kind, module in (("ORPO", "orpo"), ("CPO", "cpo"), ("GKD", "gkd"), ("OnlineDPO", "online_dpo"))
    for part in ("Config", "Trainer")
}
"""Names that `trl` had, and the module that has them now."""


def _with_old_names(init: Callable[..., None]) -> Callable[..., None]:
    fields = inspect.signature(init).parameters

    @functools.wraps(init)
    def init_config(self: Any, *args: Any, **kwargs: Any) -> None:
        owner = type(self).__name__
        prepare_config_arguments(kwargs, owner)
        if "max_prompt_length" not in fields and kwargs.pop("max_prompt_length", None) is not None:
            logger.warning("%s: max_prompt_length has no effect: this version of TRL does not truncate prompts", owner)
        if "num_generations" in fields:
            _adapt_generation(kwargs, owner, fields)
        init(self, *args, **kwargs)

    return init_config


def _adapt_generation(arguments: dict[str, Any], owner: str, fields: Mapping[str, inspect.Parameter]) -> None:
    sampling = arguments.pop("vllm_sampling_params", None)
    if sampling is not None:
        _take_over_sampling(arguments, sampling, owner)
    if arguments.get("use_vllm") and importlib.util.find_spec("vllm") is None:
        arguments["use_vllm"] = False
        logger.warning("%s: use_vllm=True has no effect: vLLM is not installed; the model itself generates", owner)
    _fill_groups(arguments, owner, fields)


def _take_over_sampling(arguments: dict[str, Any], given: Any, owner: str) -> None:
    """Set the config's own sampling fields, where the script does not set them."""
    params = read_sampling_params(given)
    changed = {
        each.name: getattr(params, each.name)
        for each in dataclasses.fields(params)
        if getattr(params, each.name) != each.default
    }
    taken = {name: changed.pop(name) for name in _SAMPLING if name in changed}
    if taken.get("top_k") == -1:  # vLLM's "all tokens", and the default of TRL by another number
        taken["top_k"] = 0
    for name, value in taken.items():
        if arguments.setdefault(name, value) != value:
            raise ConfigError(
                f"{owner} got {name}={arguments[name]!r}, and {value!r} in vllm_sampling_params.",
                fix="Remove one of them.",
            )
    unused = [name for name in changed if name not in _SERVED_BY_TRAINER]
    logger.warning(
        "%s: of vllm_sampling_params, %s are used%s", owner, ", ".join(taken) or "no settings",
        f", and {', '.join(unused)} have no effect" if unused else "",
    )  # fmt: skip


def _fill_groups(arguments: dict[str, Any], owner: str, fields: Mapping[str, inspect.Parameter]) -> None:
    """Raise the batch to `num_generations` if it holds no whole number of groups, which TRL refuses."""

    def value(name: str) -> Any:
        return arguments.get(name, fields[name].default)

    if value("generation_batch_size") is not None or value("steps_per_generation") is not None:
        return
    batch, groups = value("per_device_train_batch_size"), value("num_generations")
    rank = launched_rank()
    rows = batch * value("gradient_accumulation_steps") * (1 if rank is None else rank.world_size)
    if rows % groups:
        arguments["per_device_train_batch_size"] = groups
        logger.warning(
            "%s: per_device_train_batch_size is raised from %d to num_generations=%d, so that a batch holds whole "
            "groups of completions", owner, batch, groups,
        )  # fmt: skip


def _with_old_arguments(init: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_trainer(self: Any, *args: Any, **kwargs: Any) -> None:
        owner = type(self).__name__
        rename_tokenizer(kwargs, owner)
        moved = {name: kwargs.pop(name) for name in _MOVED if name in kwargs and name not in signature.parameters}
        if moved:
            _move_to_config(signature.bind_partial(self, *args, **kwargs).arguments.get("args"), moved, owner)
        init(self, *args, **kwargs)

    return init_trainer


_MOVED = ("beta", "loss_type", "max_length", "max_prompt_length", "dataset_num_proc")
"""Old arguments of preference trainers that are fields of their configs now."""


def _move_to_config(config: Any, moved: Mapping[str, Any], owner: str) -> None:
    if config is None:
        raise ConfigError(
            f"{owner} got {', '.join(moved)}, which are fields of its config in this version of TRL.",
            fix=f"Pass args={owner.removesuffix('Trainer')}Config(...) with them.",
        )
    logger.warning("%s's %s are arguments of its config in this version of TRL", owner, ", ".join(moved))
    for name, value in moved.items():
        if hasattr(config, name):
            setattr(config, name, value)
        else:
            logger.warning("%s: %s=%r has no effect in this version of TRL", owner, name, value)


def _with_experimental(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    said: set[str] = set()  # `from trl import` asks for a name twice

    @functools.wraps(get)
    def getattribute(self: Any, name: str) -> Any:
        if self.__name__ != "trl" or name not in EXPERIMENTAL:
            return get(self, name)
        if name not in said:
            said.add(name)
            log.start_for_scripts()
            logger.warning("trl.%s is in %s in this version", name, EXPERIMENTAL[name])
        for patch in _EXPERIMENTAL_PATCHES[EXPERIMENTAL[name]]:
            patch.apply()
        return getattr(importlib.import_module(EXPERIMENTAL[name]), name)

    return getattribute


def _config(module: str, name: str) -> LibraryPatch:
    return LibraryPatch("trl", _VERSIONS, module, "__init__", _with_old_names, _FALLBACK, False, name)


def _trainer(module: str, name: str) -> LibraryPatch:
    return LibraryPatch("trl", _VERSIONS, module, "__init__", _with_old_arguments, _FALLBACK, False, name)


_EXPERIMENTAL_PATCHES = {
    module: (
        _config(f"{module}.{kind}_config", f"{name}Config"),
        _trainer(f"{module}.{kind}_trainer", f"{name}Trainer"),
    )
    for name, kind, module in (
        ("ORPO", "orpo", "trl.experimental.orpo"),
        ("CPO", "cpo", "trl.experimental.cpo"),
        ("GKD", "gkd", "trl.experimental.gkd"),
        ("OnlineDPO", "online_dpo", "trl.experimental.online_dpo"),
    )
}
_TRAINERS = (("dpo", "DPO"), ("kto", "KTO"), ("grpo", "GRPO"), ("rloo", "RLOO"))
OLD_CONFIGS = (
    *(_config(f"trl.trainer.{kind}_config", f"{name}Config") for kind, name in (*_TRAINERS, ("reward", "Reward"))),
    *(_trainer(f"trl.trainer.{kind}_trainer", f"{name}Trainer") for kind, name in _TRAINERS),
)
OLD_PLACES = LibraryPatch(
    library="trl",
    versions=_VERSIONS,
    module="trl._lazy_module",
    class_name="_LazyModule",
    name="__getattr__",
    make=_with_experimental,
    fallback="ORPO and other experimental trainers must be imported from trl.experimental",
    required=False,
)


def revert_experimental() -> None:
    for patches in _EXPERIMENTAL_PATCHES.values():
        for patch in patches:
            patch.revert()
