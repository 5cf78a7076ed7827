"""Deprecated names of commands and configuration keys, all in one place, translated once when a config is created.

Each still works, with a warning that names its replacement. A setting and an alias that contradict each other are an
error, and so is a value that no run can honor: only keys that never changed a result are accepted and ignored, with a
warning. Aliases are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from pantheraml.base import log

logger = log.get(__name__)

_MINUTE = 60
_Section = TypeVar("_Section", bound=BaseModel)
_Model = TypeVar("_Model", bound=BaseModel)
_Train = TypeVar("_Train", bound=BaseModel)

COMMANDS = {"quantise": "quantize"}
"""Renamed commands: old name -> new name. The old name still works, with a notice."""

FIELD_ALIASES = {
    "auto_device_map": "model.device_map=auto",
    "use_gradient_checkpointing": "train.activation_checkpointing",
    "enable_hybrid": "parallel.mode=hybrid",
    "enable_fault_tolerance": "parallel.max_retries",
    "enable_gradient_synchronization": "remove it, gradients are always synchronized",
}
"""Fields that MultiGPUConfig has in Python, but that are no keys of `parallel`, and what replaces them there."""

OF_OTHER_SECTIONS: dict[str, Any] = {"auto_device_map": False, "use_gradient_checkpointing": None}
"""Aliases of keys in other sections, which a TrainConfig applies there and resets to these values. Earlier versions
stored them, so the values are no reason to warn."""

REMOVED = {"train.fp8_layouts": "remove it, it has no effect: frozen fp8 weights have one layout"}
"""Keys of earlier versions that changed no result, and what to do with them."""

KEYS = {
    **{f"parallel.{name}": replacement for name, replacement in FIELD_ALIASES.items()},
    "parallel.sync_batch_norm": "parallel.sync_bn",
    "parallel.timeout_minutes": "parallel.timeout_seconds",
    "parallel.aggregation=weighted_mean": "parallel.aggregation=weighted",
    **REMOVED,
}
"""Deprecated keys (or values) and their replacements, for docs/configuration.md."""


def _warn(alias: str) -> None:
    replacement = KEYS[alias]
    logger.warning("%s is deprecated: %s", alias, replacement if " " in replacement else f"use {replacement}")


def translate_aliases(values: dict[str, Any]) -> None:
    """Replace aliases in the `values` of MultiGPUConfig in place."""
    if values.get("aggregation") == "weighted_mean":
        _warn("parallel.aggregation=weighted_mean")
        values["aggregation"] = "weighted"
    _rename(values, "sync_batch_norm", "sync_bn", lambda value: value)
    _rename(values, "timeout_minutes", "timeout_seconds", _seconds)
    _translate_hybrid(values)
    _translate_fault_tolerance(values)
    if values.get("enable_gradient_synchronization", True) is not True:
        raise ValueError(
            "parallel.enable_gradient_synchronization cannot be turned off: processes that do not share gradients train"
            " different models; for several models, start several runs"
        )


def without_removed_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config's values without keys of earlier versions, which run folders of those still have."""
    if values.get("faults"):
        raise ValueError("faults is no key any more: tests set PANTHERAML_FAULTS=1:5:kill in the environment")
    return {name: value for name, value in values.items() if name != "faults"}


def without_removed_settings(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section's values without keys that changed no result, with a warning for each that is set.

    Run folders of earlier versions have all of them, mostly as `auto`.
    """
    removed = [name for name in values if f"{section}.{name}" in REMOVED]
    for name in removed:
        if values[name] != "auto":
            _warn(f"{section}.{name}")
    return {name: value for name, value in values.items() if name not in removed}


def warn_of_aliases(parallel: Mapping[str, Any]) -> None:
    """Warn of fields of MultiGPUConfig that are written as keys of `parallel`."""
    for name in FIELD_ALIASES:
        if name in parallel and not (name in OF_OTHER_SECTIONS and parallel[name] is OF_OTHER_SECTIONS[name]):
            _warn(f"parallel.{name}")


def translate_to_sections(
    model: _Model, train: _Train, auto_device_map: bool, checkpointing: bool | str | None
) -> tuple[_Model, _Train]:
    """Return `model` and `train` with the aliases applied."""
    if auto_device_map:
        model = _with(model, "model.device_map", "auto", "parallel.auto_device_map")
    if checkpointing is not None:
        kind = {True: "full", False: "none", "unsloth": "offload"}[checkpointing]
        train = _with(train, "train.activation_checkpointing", kind, "parallel.use_gradient_checkpointing")
    return model, train


def _with(section: _Section, name: str, value: str, alias: str) -> _Section:
    """Return `section` with one field set."""
    field = name.partition(".")[2]
    current = getattr(section, field) if field in section.model_fields_set else None
    if current not in (None, value):
        raise ValueError(f"{alias} means {name}={value}, but {name} is {current}; keep one")
    return section.model_copy(update={field: value})


def _rename(values: dict[str, Any], alias: str, name: str, convert: Any) -> None:
    if alias not in values:
        return
    _warn(f"parallel.{alias}")
    value = convert(values.pop(alias))
    if values.setdefault(name, value) != value:
        raise ValueError(f"parallel.{alias} and parallel.{name} contradict each other; keep one")


def _seconds(minutes: Any) -> Any:
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    return round(minutes * _MINUTE) if number else minutes


def _translate_hybrid(values: dict[str, Any]) -> None:
    """Set `mode` and `enable_hybrid`, two names of one setting, from either."""
    mode = str(values.get("mode", "auto"))
    enabled = bool(values.setdefault("enable_hybrid", mode == "hybrid"))
    if enabled and mode == "auto":
        values["mode"] = "hybrid"
    elif enabled != (mode == "hybrid"):
        raise ValueError(f"parallel.enable_hybrid={enabled} and parallel.mode={mode} contradict each other; keep one")


def _translate_fault_tolerance(values: dict[str, Any]) -> None:
    """Set `max_retries` and `enable_fault_tolerance` from either."""
    retries = values.get("max_retries")
    enabled = bool(values.setdefault("enable_fault_tolerance", retries not in (0, "0")))
    if enabled != (retries not in (0, "0")):
        if retries is not None:
            raise ValueError(
                f"parallel.enable_fault_tolerance={enabled} and parallel.max_retries={retries} contradict each other;"
                " keep one"
            )
        values["max_retries"] = 0
