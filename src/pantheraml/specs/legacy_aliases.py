"""Aliases of MultiGPUConfig settings, translated once when a config is created.

A setting and an alias that contradict each other are an error, and so is a value that no run can honor: options are
never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MINUTE = 60

COMMANDS = {"quantise": "quantize"}
"""Renamed commands: old name -> new name. The old name still works, with a notice."""


def translate_aliases(values: dict[str, Any]) -> None:
    """Replace aliases in `values` in place."""
    if values.get("aggregation") == "weighted_mean":
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


def translate_to_sections(values: Mapping[str, Any], auto_device_map: Any, checkpointing: Any) -> dict[str, Any]:
    """Return the config's sections with the two aliases of `parallel` applied to `model` and `train`."""
    changed = dict(values)
    if auto_device_map is True:
        changed["model"] = _with(changed.get("model"), "model.device_map", "auto", "parallel.auto_device_map")
    if checkpointing is not None:
        kind = {True: "full", False: "none", "unsloth": "offload"}.get(checkpointing)
        if kind is not None:  # invalid values are reported by the field's own validation
            name, alias = "train.activation_checkpointing", "parallel.use_gradient_checkpointing"
            changed["train"] = _with(changed.get("train"), name, kind, alias)
    return changed


def _with(section: Any, name: str, value: str, alias: str) -> Any:
    """Return `section`, a mapping or a config object, with one field set."""
    field = name.partition(".")[2]
    if section is None:
        return {field: value}
    is_model = not isinstance(section, Mapping)
    current = (
        (getattr(section, field) if field in section.model_fields_set else None) if is_model else section.get(field)
    )
    if current not in (None, value):
        raise ValueError(f"{alias} means {name}={value}, but {name} is {current}; keep one")
    return section.model_copy(update={field: value}) if is_model else {**section, field: value}


def _rename(values: dict[str, Any], alias: str, name: str, convert: Any) -> None:
    if alias not in values:
        return
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
