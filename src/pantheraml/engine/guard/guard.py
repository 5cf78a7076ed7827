"""Guard: step policy, clipping and norm monitors of a run, with the state that checkpoints save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheraml.engine.guard.clipping import build_clipping
from pantheraml.engine.guard.norms import GroupNorms, ShardedParams, UpdateRatio
from pantheraml.engine.guard.policy import Policy
from pantheraml.specs.train import StabilityConfig


class Guard:
    def __init__(
        self, config: StabilityConfig, max_grad_norm: float, params: ShardedParams, vocabulary: int | None = None
    ) -> None:
        """`vocabulary`: vocabulary size of the model."""
        self._kind = config.clipping
        self.policy = Policy(config, vocabulary)
        self.clipping = build_clipping(config, max_grad_norm, params)
        self.updates = UpdateRatio(config.update_ratio_every, params)
        self.groups = GroupNorms(1 if config.debug else config.group_norms_every, params)

    def to_state(self) -> dict[str, Any]:
        """Plain values, equal on all ranks and independent of the parallel layout. A collective."""
        return {"policy": self.policy.to_state(), "clipping": {"kind": self._kind, **self.clipping.to_state()}}

    def from_state(self, state: Mapping[str, Any]) -> None:
        """Restore; clipping statistics only if they are from the same kind of clipping."""
        self.policy.from_state(state["policy"])
        if state["clipping"]["kind"] == self._kind:
            self.clipping.from_state(state["clipping"])
