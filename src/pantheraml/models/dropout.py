"""Disable randomness in a model: dropout, layer drop, router jitter.

Ranks draw different random numbers, so only deterministic computation can be compared value by value.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

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
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return any(map(_probabilities, configs.values())) or any(
        (isinstance(module, _DropoutNd) and module.p > 0)
        or bool(_probabilities(module))
        or bool(getattr(module, "neftune_noise_alpha", None))
        for module in model.modules()
    )


def _zero(holder: Any) -> set[str]:
    probabilities = _probabilities(holder)
    for name in probabilities:
        setattr(holder, name, 0.0)
    return probabilities


def _probabilities(holder: Any) -> set[str]:
    """Return the names of those that are not 0."""
    return {
        name
        for name, value in vars(holder).items()
        if isinstance(value, float)
        and value > 0
        and any(word in name for word in _RANDOM)
        and not name.startswith(_OTHER_HEADS)
    }
