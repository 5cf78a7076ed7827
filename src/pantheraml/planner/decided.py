"""Settings left open by the configuration, as decided by a comparison of plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pantheraml.specs.parallel import DIMENSIONS, ParallelDims
from pantheraml.specs.train import Checkpointing, TrainConfig


@dataclass(frozen=True)
class Decided:
    """None: the rules of `choose` decide."""

    dims: ParallelDims | None = None
    checkpointing: Checkpointing | None = None
    micro_batch: int | None = None
    frozen_weights: Literal["int8", "nf4"] | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by the name of the choice."""

    def changes(self) -> dict[str, Any]:
        """Settings of a configuration that say the same, by their keys."""
        found: dict[str, Any] = {}
        if self.dims is not None:
            found |= {f"parallel.{name}": getattr(self.dims, name) for name in DIMENSIONS}
            found = {name: degree for name, degree in found.items() if degree > 1}
        for name, value in (
            ("train.activation_checkpointing", self.checkpointing),
            ("train.micro_batch_size", self.micro_batch),
            ("model.precision", self.frozen_weights),
        ):
            if value is not None:
                found[name] = value
        return found

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Return a copy of the configuration with these settings, which it leaves open."""
        train: dict[str, Any] = {}
        if self.checkpointing is not None:
            train["activation_checkpointing"] = self.checkpointing
        if self.micro_batch is not None:
            train["micro_batch_size"] = self.micro_batch
        update: dict[str, Any] = {"train": config.train.model_copy(update=train)} if train else {}
        if self.frozen_weights is not None:
            update["model"] = config.model.model_copy(update={"precision": self.frozen_weights})
        if self.dims is not None:
            degrees = {name: getattr(self.dims, name) for name in DIMENSIONS}
            update["parallel"] = dataclasses.replace(config.parallel, **degrees)
        return config.model_copy(update=update) if update else config
