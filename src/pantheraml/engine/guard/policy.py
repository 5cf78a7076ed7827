"""After backward and before the step, all ranks take one decision: step, zero what is not finite, skip, or stop.

    nonfinite    NaN or infinity in a loss or a gradient: `stability.on_nonfinite`
    spike        a loss far above the recent ones: `stability.on_spike`
    overflow     fp16's loss scale is too large: that step is skipped, whatever the policy, and the scale lowered

Answers that let a run go on are bounded, in a row and in all. What the decisions went by is plain numbers, the same on
all ranks, and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pantheraml.engine.guard.statistics import MovingStatistics
from pantheraml.engine.guard.verdict import StepNumbers, Verdict
from pantheraml.specs.train import StabilityConfig

LOSS_DECAY = 0.98
"""A loss is compared with about the last 50 ones."""


class Policy:
    def __init__(self, config: StabilityConfig) -> None:
        self._config = config
        self._losses = MovingStatistics(decay=LOSS_DECAY, warmup=config.spike_warmup_steps)
        self.bad_in_a_row = 0
        """Steps up to the last one that were skipped or zeroed."""
        self._bad_in_all = 0
        self.last_was_nonfinite = False
        self.rate_factor = 1.0
        """What the schedule's learning rate is to be multiplied by."""

    def decide(self, numbers: StepNumbers, *, loss_scale: float | None) -> Verdict:
        """Once for every step. `loss_scale` is the current fp16 loss scale, or None without loss scaling."""
        verdict = self._verdict(numbers, loss_scale)
        if verdict.action == "stop":
            return verdict  # nothing is learnt from a step that a resumed run comes to again
        self.last_was_nonfinite = verdict.anomaly == "nonfinite"
        if numbers.finite:
            self._remember(numbers.loss)
        if verdict.action == "step":
            self.bad_in_a_row = 0
        else:
            self.bad_in_a_row += 1
            self._bad_in_all += verdict.anomaly != "overflow"
        return verdict

    def _verdict(self, numbers: StepNumbers, loss_scale: float | None) -> Verdict:
        config = self._config
        if not numbers.finite:
            cause = f"the gradient norm is {numbers.grad_norm}"
            if numbers.bad_ranks:
                cause = f"the loss is not finite on rank {', '.join(map(str, numbers.bad_ranks))}"
            elif loss_scale is not None and loss_scale > 1.0:
                cause = f"fp16 overflow at loss scale {loss_scale:g}; the scale is lowered"
                return Verdict("skip", cause, "overflow")
            return self._answer(config.on_nonfinite, Verdict("stop", cause, "nonfinite"))
        score = self._losses.score(numbers.loss)
        if config.on_spike != "ignore" and score > config.spike_zscore:
            cause = (
                f"the loss {numbers.loss:.4g} is {score:.1f} standard deviations above its mean {self._losses.mean:.4g}"
            )
            return self._answer(config.on_spike, Verdict("stop", cause, "spike"))
        return Verdict("step", "loss and gradient are finite")

    def _answer(self, way: str, stop: Verdict) -> Verdict:
        """The verdict on an anomaly that is to be met in that `way`; `stop` says what it is."""
        config, cause, anomaly = self._config, stop.cause, stop.anomaly
        if way == "stop":
            return stop
        if way == "detect":
            return Verdict("step", cause, anomaly)
        if self.bad_in_a_row >= config.max_skipped_steps:
            return Verdict("stop", f"{cause}, after {self.bad_in_a_row} skipped step(s) in a row", anomaly)
        if self._bad_in_all >= config.max_skipped_total:
            return Verdict("stop", f"{cause}, after {self._bad_in_all} skipped step(s) in all", anomaly)
        if way == "lower_rate":
            self.rate_factor *= config.rate_factor
            cause = f"{cause}; the learning rate is lowered to {self.rate_factor:g} of the schedule's"
        return Verdict("zero" if way == "zero" else "skip", cause, anomaly)

    def _remember(self, loss: float) -> None:
        """A spike counts as no more than one just not: it must not hide the next, but a new level is learnt."""
        if self._losses.ready:
            loss = min(loss, self._losses.mean + self._config.spike_zscore * self._losses.spread)
        self._losses.add(loss)

    def to_state(self) -> dict[str, Any]:
        return {
            "losses": self._losses.to_state(),
            "bad_in_a_row": self.bad_in_a_row,
            "bad_in_all": self._bad_in_all,
            "last_was_nonfinite": self.last_was_nonfinite,
            "rate_factor": self.rate_factor,
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._losses.from_state(state["losses"])
        self.bad_in_a_row, self._bad_in_all = state["bad_in_a_row"], state["bad_in_all"]
        self.last_was_nonfinite, self.rate_factor = state["last_was_nonfinite"], state["rate_factor"]
