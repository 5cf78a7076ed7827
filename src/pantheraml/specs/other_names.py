"""Other names by which people know settings of MultiGPUConfig: each is translated once, when a value is made.

A setting and its other name that say different things are an error. What makes no sense in any run is one too: an
option that is accepted and ignored would be a promise that is not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MINUTE = 60


def translate_other_names(values: dict[str, Any]) -> None:
    """In place."""
    if values.get("aggregation") == "weighted_mean":
        values["aggregation"] = "weighted"
    _rename(values, "sync_batch_norm", "sync_bn", lambda value: value)
    _rename(values, "timeout_minutes", "timeout_seconds", _seconds)
    if "enable_hybrid" in values:
        _translate_hybrid(values)
    if "enable_fault_tolerance" in values:
        _translate_fault_tolerance(values)
    if values.pop("enable_gradient_synchronization", True) is not True:
        raise ValueError(
            "parallel.enable_gradient_synchronization: processes that do not share gradients train different models,"
            " so it cannot be switched off; for models of their own, start runs of their own"
        )


def translate_to_sections(values: Mapping[str, Any], auto_device_map: Any, checkpointing: Any) -> dict[str, Any]:
    """A configuration's sections, with what two fields of `parallel` say about `model` and `train`."""
    changed = dict(values)
    if auto_device_map is True:
        changed["model"] = _with(changed.get("model"), "model.device_map", "auto", "parallel.auto_device_map")
    if checkpointing is not None:
        kind = {True: "full", False: "none", "unsloth": "offload"}.get(checkpointing)
        if kind is not None:  # anything else is for the field's own check to refuse
            name, other = "train.activation_checkpointing", "parallel.use_gradient_checkpointing"
            changed["train"] = _with(changed.get("train"), name, kind, other)
    return changed


def _with(section: Any, name: str, value: str, other_name: str) -> Any:
    """`section`, a mapping or a value that was made already, with one more field."""
    field = name.partition(".")[2]
    if section is None:
        return {field: value}
    made = not isinstance(section, Mapping)
    said = (getattr(section, field) if field in section.model_fields_set else None) if made else section.get(field)
    if said not in (None, value):
        raise ValueError(f"{other_name} means {name}={value}, but {name} is {said}; keep one")
    return section.model_copy(update={field: value}) if made else {**section, field: value}


def _rename(values: dict[str, Any], other: str, name: str, convert: Any) -> None:
    if other not in values:
        return
    value = convert(values.pop(other))
    if values.setdefault(name, value) != value:
        raise ValueError(f"parallel.{other} and parallel.{name} say different things; keep one")


def _seconds(minutes: Any) -> Any:
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    return round(minutes * _MINUTE) if number else minutes


def _translate_hybrid(values: dict[str, Any]) -> None:
    wanted, mode = bool(values.pop("enable_hybrid")), str(values.get("mode", "auto"))
    if wanted and mode == "auto":
        values["mode"] = "hybrid"
    elif wanted != (mode == "hybrid"):
        raise ValueError(f"parallel.enable_hybrid={wanted} and parallel.mode={mode} say different things; keep one")


def _translate_fault_tolerance(values: dict[str, Any]) -> None:
    wanted, retries = bool(values.pop("enable_fault_tolerance")), values.get("max_retries")
    if wanted != (retries != 0):
        if retries is not None:
            raise ValueError(
                f"parallel.enable_fault_tolerance={wanted} and parallel.max_retries={retries} say different things;"
                " keep one"
            )
        values["max_retries"] = 0
