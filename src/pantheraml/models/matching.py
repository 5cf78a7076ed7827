"""Which tensor of a checkpoint's files becomes which weight of a model.

Names are matched as transformers matches them. Where its rules would rename, merge, split or turn a tensor round, and
whatever else is not one tensor for one weight, `CannotStream` says why, and the ordinary way of loading is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from pantheraml.base import log
from pantheraml.models.quantise.packed import Packing, packable_layers
from pantheraml.models.quantise.stored import StoredFormat

logger = log.get(__name__)


class CannotStream(Exception):
    """Why a checkpoint is not one tensor for one weight."""


@dataclass
class Unit:
    """Tensors that are read together: one weight, or all of a layer that is replaced as a whole."""

    module: str
    replaced: bool
    parts: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """Name within the module -> the file, and the name in it."""


@dataclass(frozen=True)
class Matched:
    units: list[Unit]
    missing: set[str]
    """Weights that no file has because they are tied to others."""


def match_weights(
    model: Any, opened: Mapping[Path, Any], *, packing: Packing | None, stored: StoredFormat | None
) -> Matched:
    """`model` is built on the meta device; `opened` are its safetensors files. CannotStream if they do not match."""
    expected: dict[str, Tensor] = model.state_dict()
    rename = _renaming(model, expected)
    # key in the files -> name of the weight, and the part of it (empty: the weight itself)
    meant: dict[str, tuple[str, str]] = {}
    for tensors in opened.values():
        for key in tensors.keys():  # noqa: SIM118 (a safetensors file, not a dict)
            if key in meant:
                raise CannotStream(f"{key} is in two files")
            layer, part = (stored.split(key) if stored else None) or ("", "")
            meant[key] = (rename(f"{layer}.weight" if part else key), part)
    unknown = [key for key, (name, _) in meant.items() if name not in expected]
    if unknown:
        logger.info("%d tensor(s) of the checkpoint are not in this model, such as %s", len(unknown), unknown[0])
    if stored is None:
        replaced = set() if packing is None else set(packable_layers(model, packing))
    else:
        replaced = {name.rpartition(".")[0] for name, part in meant.values() if part and name in expected}
    _check_not_shared(model, replaced)
    units: dict[str, Unit] = {}
    for file, tensors in opened.items():
        for key in tensors.keys():  # noqa: SIM118
            name, part = meant[key]
            if name not in expected:
                continue
            module, _, own = name.rpartition(".")
            whole = module in replaced
            unit = units.setdefault(module if whole else name, Unit(module, whole))
            if (part or own) in unit.parts:
                raise CannotStream(f"{name} is in the files under two names")
            unit.parts[part or own] = (file, key)
            packed_already = stored is not None and whole and own == "weight"
            if not packed_already and torch.Size(tensors.get_slice(key).get_shape()) != expected[name].shape:
                raise CannotStream(f"{name} is of another shape")
    found = {name for name, part in meant.values() if not part}
    missing = set(expected) - found
    lost = missing - _tied(model, found)
    if lost:
        raise CannotStream(f"{min(lost)} is missing")
    return Matched(list(units.values()), missing)


def _renaming(model: Any, expected: Mapping[str, Tensor]) -> Callable[[str], str]:
    """From a name in the files to a name in the model: transformers adds or drops the prefix of the model's body."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]

    def rename(key: str) -> str:
        changed, converted = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        name, _ = rename_source_key(key, [], [], model.base_model_prefix, expected)
        # transformers takes a name as it is where its rules lead nowhere
        if (changed, converted) != (name, None) and not (changed not in expected and key in expected):
            raise CannotStream(f"{key} has to be converted")
        return str(name)

    return rename


def _check_not_shared(model: Any, replaced: set[str]) -> None:
    tied = {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
    if replaced & tied:
        raise CannotStream(f"{min(replaced & tied)} shares its weight with another layer")


def _tied(model: Any, found: set[str]) -> set[str]:
    """The weights that get their values from one in `found` by being tied to it."""
    groups: dict[str, set[str]] = {}
    for name, original in model.all_tied_weights_keys.items():
        groups.setdefault(original, {original}).add(name)
    return set().union(*(group for group in groups.values() if group & found))
