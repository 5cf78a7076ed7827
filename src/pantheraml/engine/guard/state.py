"""Guard: what watches over the steps of a run and has to be remembered when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheraml.engine.guard.clipping import build_clipping
from pantheraml.engine.guard.groups import GroupNorms
from pantheraml.engine.guard.norms import Spread
from pantheraml.engine.guard.policy import Policy
from pantheraml.engine.guard.updates import UpdateRatio
from pantheraml.specs.train import StabilityConfig


class Guard:
    def __init__(
        self, config: StabilityConfig, max_grad_norm: float, spread: Spread, vocabulary: int | None = None
    ) -> None:
        """`vocabulary`: the number of tokens that the model knows."""
        self._kind = config.clipping
        self.policy = Policy(config, vocabulary)
        self.clipping = build_clipping(config, max_grad_norm, spread)
        self.updates = UpdateRatio(config.update_ratio_every, spread)
        self.groups = GroupNorms(1 if config.debug else config.group_norms_every, spread)

    def to_state(self) -> dict[str, Any]:
        """Plain values, the same on all ranks, that know nothing of how the model is spread. A collective."""
        return {"policy": self.policy.to_state(), "clipping": {"kind": self._kind, **self.clipping.to_state()}}

    def from_state(self, state: Mapping[str, Any]) -> None:
        """What another kind of clipping has learnt is of no use to this one, which then starts afresh."""
        self.policy.from_state(state["policy"])
        if state["clipping"]["kind"] == self._kind:
            self.clipping.from_state(state["clipping"])
