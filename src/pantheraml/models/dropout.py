"""Taking what is left to chance out of a model: dropout, layers that are left out, noise on the choice of experts.

Processes draw random numbers of their own, so only what computes without them can be compared number by number.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_CHANCE = ("drop", "jitter")
"""In the names that transformers gives to such probabilities."""

_OTHER_HEADS = ("summary", "classifier")
"""In the names of those that a config has for heads which a causal language model is without."""


def remove_dropout(model: nn.Module) -> frozenset[str]:
    """Set every probability that a module of `model` holds to 0, in place; the names of those that were not."""
    found = set()
    for path, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            # PEFT's are in a dict by adapter: `lora_dropout.default`
            parts = path.split(".")
            found.add(next((part for part in reversed(parts) if "drop" in part), parts[-1]))
            module.p = 0.0
        found |= _zero(module)
    return frozenset(found)


def remove_dropout_from_configs(model: nn.Module) -> frozenset[str]:
    """The same for the configs, which some families look at in every pass."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return frozenset[str]().union(*(_zero(config) for config in configs.values()))


def _zero(holder: Any) -> set[str]:
    probabilities = {
        name
        for name, value in vars(holder).items()
        if isinstance(value, float)
        and value > 0
        and any(word in name for word in _CHANCE)
        and not name.startswith(_OTHER_HEADS)
    }
    for name in probabilities:
        setattr(holder, name, 0.0)
    return probabilities
