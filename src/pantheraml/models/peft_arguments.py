"""Arguments of PEFT's `LoraConfig` beyond those of a run's config: for scripts that pass them to `get_peft_model`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pantheraml.base.errors import ConfigError

PASSED_ON = ("alpha_pattern", "bias", "init_lora_weights", "lora_bias", "rank_pattern", "trainable_token_indices")
"""What PEFT itself does with these is what is wanted."""
BIASES = ("none", "lora_only", "all")
_BY_DEFAULT: Mapping[str, Any] = {"bias": "none", "init_lora_weights": True, "lora_bias": False}


@dataclass(frozen=True)
class LayerChoice:
    """Which of the targets are adapted.

    PEFT ignores `layers_to_transform` for full names, so layers are chosen here.
    """

    exclude_modules: str | Sequence[str] | None = None
    """Names or ends of names; a string is a regular expression for whole names."""
    layers_to_transform: int | Sequence[int] | None = None
    """Numbers of the layers that are adapted."""
    layers_pattern: str | Sequence[str] | None = None
    """Names of the lists that `layers_to_transform` counts in; without it, any list."""

    def of(self, names: Iterable[str]) -> list[str]:
        """Return the names that remain. ConfigError if none does."""
        kept = [name for name in names if not self._excludes(name) and self._has_number(name)]
        if not kept:
            settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if value is not None)
            raise ConfigError(f"No layer is left to train: {settings}.", fix="Choose other layers.")
        return kept

    def _excludes(self, name: str) -> bool:
        if isinstance(self.exclude_modules, str):
            return _pattern(self.exclude_modules, "exclude_modules").fullmatch(name) is not None
        return any(name == end or name.endswith(f".{end}") for end in self.exclude_modules or ())

    def _has_number(self, name: str) -> bool:
        if self.layers_to_transform is None:
            return True
        numbers = self.layers_to_transform
        wanted = {numbers} if isinstance(numbers, int) else set(numbers)
        lists = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        parts = name.split(".")
        counted = [
            int(number)
            for before, number in itertools.pairwise(parts)
            if number.isdigit() and (not lists or before in lists)
        ]
        return bool(counted) and counted[0] in wanted


def matched_names(targets: str, names: Iterable[str]) -> list[str]:
    """Return the whole names that the regular expression `targets` matches."""
    pattern = _pattern(targets, "target_modules")
    return [name for name in names if pattern.fullmatch(name)]


def config_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that `LoraConfig` gets, without those that ask for its default."""
    bias = arguments.get("bias")
    if bias not in (None, *BIASES):
        raise ConfigError(f"bias={bias!r} is not known.", fix=f"Use one of {', '.join(map(repr, BIASES))}.")
    return {
        name: arguments[name]
        for name in PASSED_ON
        if name in arguments and arguments[name] not in (None, {}, [], _BY_DEFAULT.get(name))
    }


def _pattern(text: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as err:
        raise ConfigError(
            f"{name}={text!r} is no regular expression: {err}.", fix="Pass a list of names, or a valid expression."
        ) from err
