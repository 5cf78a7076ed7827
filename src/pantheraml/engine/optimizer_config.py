"""An optimizer as {"class": its class, "kwargs": its arguments}, for trainers that make it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pantheraml.base.errors import ConfigError

_FIX = "Pass {'class': torch.optim.AdamW, 'kwargs': {'lr': 2e-5}}."


class OptimizerConfig:
    def __init__(self, config: Any) -> None:
        """Check it before anything is started."""
        if not isinstance(config, Mapping) or "class" not in config:
            raise ConfigError("optimizer_config has no 'class'.", fix=_FIX)
        unknown = sorted(set(config) - {"class", "kwargs"}, key=str)
        if unknown:
            raise ConfigError(f"optimizer_config has no entry {unknown[0]!r}.", fix=_FIX)
        kind, arguments = config["class"], config.get("kwargs") or {}
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise ConfigError(f"optimizer_config['class']={kind!r} is not an optimizer class.", fix=_FIX)
        if not isinstance(arguments, Mapping):
            raise ConfigError(f"optimizer_config['kwargs'] is a {type(arguments).__name__}, not a dict.", fix=_FIX)
        self._kind: type[Optimizer] = kind
        self._arguments = dict(arguments)

    def make(self, model: nn.Module) -> Optimizer:
        """Make the optimizer of the model's trainable parameters."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigError("The model has no trainable parameters.", fix="Set requires_grad on some parameters.")
        try:
            return self._kind(trained, **self._arguments)
        except (TypeError, ValueError) as err:
            raise ConfigError(
                f"optimizer_config['kwargs'] do not fit {self._kind.__name__}: {err}.", fix="See its documentation."
            ) from err
