"""Map the tensors of checkpoint files to the weights of a model.

Names are matched as transformers matches them; the rules that rename whole families (vision-language models are
published under older names) are applied. Where its rules merge, split or transpose tensors, or a checkpoint is
otherwise not one tensor per weight, `CannotStream` gives the reason and transformers loads the model instead.
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
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.models.model_kind import classifier_head, inside
from pantheraml.models.quantize.checkpoint_formats import MXFP4_PARTS, CheckpointFormat
from pantheraml.models.quantize.direct_weights import directly_read
from pantheraml.models.quantize.mxfp4 import dequantized_shape
from pantheraml.models.quantize.quantized_linear import QuantFormat, quantizable_linears

logger = log.get(__name__)


class CannotStream(Exception):
    """Reason why a checkpoint is not one tensor per weight."""


@dataclass
class WeightUnit:
    """Tensors that are read together: one weight, or all of a layer that is replaced as a whole."""

    module: str
    replaced: bool
    parts: dict[str, tuple[Path, str]] = field(default_factory=dict)
    """Name within the module -> (file, name in the file)."""
    packed: str | None = None
    """The weight that the parts are the blocks and scales of (mxfp4)."""

    def weights(self) -> set[str]:
        """Return the names of its weights within the module."""
        return set(self.parts) if self.packed is None else {self.packed}


@dataclass(frozen=True)
class WeightMapping:
    units: list[WeightUnit]
    missing: set[str]
    """Weights in no file because they are tied to others."""
    new: set[str]
    """Weights in no file that may be initialized: those of a classifier's head."""
    renamings: list[WeightRenaming] = field(default_factory=list)
    """Rules of transformers that gave the weights their names."""


def match_weights(
    model: Any,
    opened: Mapping[Path, Any],
    *,
    quant_format: QuantFormat | None,
    checkpoint_format: CheckpointFormat | None,
) -> WeightMapping:
    """Match the safetensors files `opened` to `model`, which is on the meta device; CannotStream if they do not
    match."""
    expected: dict[str, Tensor] = model.state_dict()
    rename = _Renaming(model, expected)
    targets = _targets(opened, checkpoint_format, rename)
    unknown = [key for key, (name, _) in targets.items() if name not in expected]
    if unknown:
        logger.info("%d tensor(s) of the checkpoint are not used by this model, such as %s", len(unknown), unknown[0])
    quantized_linears = checkpoint_format is not None and checkpoint_format.linear_format is not None
    if not quantized_linears:
        replaced = set() if quant_format is None else set(quantizable_linears(model, quant_format))
    else:
        replaced = {name.rpartition(".")[0] for name, part in targets.values() if part and name in expected}
        _check_not_read(model, replaced, quant_format)
    _check_not_shared(model, replaced)
    head = inside(classifier_head(model), model)
    units: dict[str, WeightUnit] = {}
    for file, tensors in opened.items():
        for key in tensors.keys():  # noqa: SIM118
            name, part = targets[key]
            if name not in expected:
                continue
            module, _, own = name.rpartition(".")
            whole = module in replaced
            unit = units.setdefault(module if whole else name, WeightUnit(module, whole))
            if (part or own) in unit.parts:
                raise CannotStream(f"{name} is in the files under two names")
            unit.parts[part or own] = (file, key)
            if part and not whole:
                unit.packed = own
            is_quantized = quantized_linears and whole and own == "weight"
            if not (is_quantized or _has_shape(tensors, key, part, expected[name].shape)):
                if module in head:
                    raise ConfigError(
                        f"The checkpoint's {name} is not for num_labels={model.config.num_labels}.",
                        fix="Leave num_labels out.",
                    )
                raise CannotStream(f"{name} has a different shape")
    present = {name for name, part in targets.values() if not part or part in MXFP4_PARTS}
    missing = set(expected) - present
    new = {name for name in missing if name.rpartition(".")[0] in head}
    untied = missing - new - _tied(model, present)
    if untied:
        raise CannotStream(f"{min(untied)} is missing")
    return WeightMapping(list(units.values()), missing - new, new, rename.used())


def _targets(
    opened: Mapping[Path, Any], checkpoint_format: CheckpointFormat | None, rename: Callable[[str], str]
) -> dict[str, tuple[str, str]]:
    """Return key in the files -> name of the weight, and its quantization part (empty: the weight itself)."""
    targets: dict[str, tuple[str, str]] = {}
    for tensors in opened.values():
        for key in tensors.keys():  # noqa: SIM118 (a safetensors file, not a dict)
            if key in targets:
                raise CannotStream(f"{key} is in two files")
            name, part = (checkpoint_format.split(key) if checkpoint_format else None) or (key, "")
            targets[key] = (rename(name), part)
    return targets


def _has_shape(tensors: Any, key: str, part: str, expected: torch.Size) -> bool:
    """Return whether a tensor of the file fits the weight; other parts than blocks are checked when they are read."""
    shape = torch.Size(tensors.get_slice(key).get_shape())
    if part == "blocks":
        return len(shape) == 4 and dequantized_shape(shape) == expected
    return bool(part) or shape == expected


class _Renaming:
    """The map from names in the files to names in the model; transformers adds or drops the base model prefix."""

    def __init__(self, model: Any, expected: Mapping[str, Tensor]) -> None:
        self._prefix, self._expected = model.base_model_prefix, expected
        self._rules = get_model_conversion_mapping(model)
        self._own = [rule for rule in get_model_conversion_mapping(model, add_legacy=False) if _renames(rule)]

    def __call__(self, key: str) -> str:
        renamings = [rule for rule in self._rules if _renames(rule)]
        converters = [rule for rule in self._rules if isinstance(rule, WeightConverter)]
        changed, converted = self._apply(key, renamings, converters)
        own, _ = self._apply(key, self._own, [])
        name, _ = self._apply(key, [], [])
        # transformers falls back to the unchanged name if its rules match no weight
        if (changed, converted) == (name, None) or (changed not in self._expected and key in self._expected):
            return name
        if converted is not None or own != changed or changed not in self._expected:
            raise CannotStream(f"{key} needs conversion")
        return changed

    def _apply(self, key: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        name, converted = rename_source_key(key, renamings, converters, self._prefix, self._expected)
        return str(name), converted

    def used(self) -> list[WeightRenaming]:
        """Return the family's rules that matched a name."""
        return [rule for rule in self._own if rule.was_used()]


def _renames(rule: Any) -> bool:
    return isinstance(rule, WeightRenaming)


def _check_not_read(model: Any, replaced: set[str], quant_format: QuantFormat | None) -> None:
    read = replaced & directly_read(model)
    if read and quant_format is not None:
        raise UnsupportedModelError(
            f"The checkpoint is quantized, but {type(model).__name__} reads the plain weight of {min(read)}.",
            fix="Use the model's plain (bf16) weights: quantized while loading, such layers stay unquantized.",
        )


def _check_not_shared(model: Any, replaced: set[str]) -> None:
    tied = {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}
    if replaced & tied:
        raise CannotStream(f"{min(replaced & tied)} shares its weight with another layer")


def _tied(model: Any, present: set[str]) -> set[str]:
    """Return the weights that are tied to one in `present`, and so get its values."""
    groups: dict[str, set[str]] = {}
    for name, original in model.all_tied_weights_keys.items():
        groups.setdefault(original, {original}).add(name)
    return set().union(*(group for group in groups.values() if group & present))
