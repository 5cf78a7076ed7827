"""Disable randomness in a model: dropout, layer drop, router jitter.

Ranks draw different random numbers, so only deterministic computation can be compared value by value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pantheraml.models.module_walk_cache import every_module

_RANDOM = ("drop", "jitter")
"""Substrings of the names that transformers gives to such probabilities."""

_OTHER_HEADS = ("summary", "classifier")
"""Name prefixes of probabilities for heads that a causal language model does not have."""


def remove_dropout(model: nn.Module) -> frozenset[str]:
    """Set every such probability in the modules of `model` to 0, in place; return the names of those that were not
    0."""
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            # PEFT keeps them in a dict by adapter: `lora_dropout.default`
            parts = path.split(".")
            names.add(next((part for part in reversed(parts) if "drop" in part), parts[-1]))
            module.p = 0.0
        names |= _zero(module)
    return frozenset(names)


def remove_dropout_from_configs(model: nn.Module) -> frozenset[str]:
    """Do the same for the configs, which some families read in every forward."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return frozenset[str]().union(*(_zero(config) for config in configs.values()))


def is_random(model: nn.Module) -> bool:
    """Return whether training draws random numbers for each token: by one of these, or by NEFTune's noise."""
    states = [vars(module) for module in every_module(model)]
    configs = {id(config): config for state in states if (config := state.get("config"))}
    return (
        any(isinstance(module, _DropoutNd) and module.p > 0 for module in every_module(model))
        or any(state.get("neftune_noise_alpha") for state in states)
        or any(map(_probabilities_in, itertools.chain(map(vars, configs.values()), states)))
    )


def _zero(holder: Any) -> set[str]:
    probabilities = _probabilities(holder)
    for name in probabilities:
        setattr(holder, name, 0.0)
    return probabilities


def _probabilities(holder: Any) -> set[str]:
    """Return the names of those that are not 0."""
    return _probabilities_in(vars(holder))


def _probabilities_in(state: Mapping[str, Any]) -> set[str]:
    return {
        name
        for name, value in state.items()
        if isinstance(value, float)
        and value > 0
        and any(word in name for word in _RANDOM)
        and not name.startswith(_OTHER_HEADS)
    }
