"""After backward and before the step, all ranks take one decision: step, zero what is not finite, skip, roll back or
stop.

    nonfinite    NaN or infinity in a loss or a gradient: `stability.on_nonfinite`
    spike        a loss far above the recent ones or, before there are enough, above all that a run that learns can
                 have: `stability.on_spike`
    jump         a gradient norm far above the recent ones, as a flipped bit makes it: likewise
    left_out     some ranks' gradients are not finite and did not enter (`parallel.leave_out_nonfinite`): step
    overflow     under fp16 a gradient is not finite: the loss scale may be too large, so the step is run again with a
                 smaller one, and is not finite only if a scale of 1 does not help

Answers that let a run go on are bounded, in a row and in all. What the decisions went by is plain numbers, the same on
all ranks, and resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pantheraml.engine.guard.statistics import MovingStatistics
from pantheraml.engine.guard.trend import LossTrend
from pantheraml.engine.guard.verdict import Anomaly, StepNumbers, Verdict
from pantheraml.specs.train import StabilityConfig

LOSS_DECAY = 0.98
"""A loss is compared with about the last 50 ones."""

NORM_DECAY, NORM_WARMUP = 0.95, 5
"""A gradient norm is compared with about the last 20 ones, and soon: one that is in order costs a second pass."""

JUMP = 10.0
"""Times the mean of recent norms. Those scatter far more than losses do; less than that is for clipping."""


class Policy:
    def __init__(self, config: StabilityConfig, vocabulary: int | None = None) -> None:
        """`vocabulary`: the number of tokens that the model knows."""
        self._config = config
        self.trend = LossTrend(vocabulary)
        self._losses = MovingStatistics(decay=LOSS_DECAY, warmup=config.spike_warmup_steps)
        self._norms = MovingStatistics(decay=NORM_DECAY, warmup=NORM_WARMUP)
        self.bad_in_a_row = 0
        """Steps up to the last one that were skipped or zeroed."""
        self._bad_in_all = 0
        self._rollbacks = 0
        self.last_anomaly: Anomaly | None = None
        """Of the last step."""
        self.rate_factor = 1.0
        """What the schedule's learning rate is to be multiplied by."""

    def decide(self, numbers: StepNumbers, *, loss_scale: float | None) -> Verdict:
        """Once for every step. `loss_scale` is the current fp16 loss scale, or None without loss scaling."""
        return self.settle(self.look(numbers, loss_scale=loss_scale), numbers)

    def settle(self, verdict: Verdict, numbers: StepNumbers) -> Verdict:
        """Have what `look` said be the decision on the step."""
        if verdict.action in ("stop", "retry"):
            return verdict  # nothing is learnt from a step that the run, or a resumed one, comes to again
        # Other weights are to come to other steps: what is bad then has causes of its own.
        self.last_anomaly = None if verdict.action == "roll_back" else verdict.anomaly
        self._rollbacks += verdict.action == "roll_back"
        self.rate_factor = verdict.rate_factor
        if numbers.finite:
            self._remember(numbers)
            self.trend.add(numbers.loss, taken=verdict.action == "step")
        if verdict.action == "step":
            self.bad_in_a_row = 0
        else:
            self.bad_in_a_row += 1
            self._bad_in_all += 1
        return verdict

    def look(self, numbers: StepNumbers, *, loss_scale: float | None) -> Verdict:
        """What `decide` would say; nothing is remembered of it."""
        config = self._config
        if numbers.bad_ranks:
            cause = f"the loss is not finite on rank {_listed(numbers.bad_ranks)}"
            return self._answer(config.on_nonfinite, "nonfinite", cause)
        if not numbers.gradients_finite and loss_scale is not None and loss_scale > 1.0:
            return Verdict("retry", f"fp16 overflow at loss scale {loss_scale:g}", "overflow", self.rate_factor)
        if not numbers.finite:
            return self._answer(config.on_nonfinite, "nonfinite", f"the gradient norm is {numbers.grad_norm}")
        score = self._losses.score(numbers.loss)
        if config.on_spike != "ignore" and score > config.spike_zscore:
            cause = (
                f"the loss {numbers.loss:.4g} is {score:.1f} standard deviations above its mean {self._losses.mean:.4g}"
            )
            return self._answer(config.on_spike, "spike", cause)
        early = None if self._losses.ready else self.trend.cause(numbers.loss)
        if config.on_spike != "ignore" and early is not None:
            return self._answer(config.on_spike, "spike", early)
        if config.on_spike != "ignore" and self._is_jump(numbers.grad_norm):
            cause = f"the gradient norm {numbers.grad_norm:.4g} is {numbers.grad_norm / self._norms.mean:.3g} times"
            return self._answer(config.on_spike, "jump", f"{cause} its mean {self._norms.mean:.4g}")
        if numbers.left_out:
            cause = f"the gradient of rank {_listed(numbers.left_out)} is not finite and does not enter"
            return Verdict("step", cause, "left_out", self.rate_factor)
        return Verdict("step", "loss and gradient are finite", rate_factor=self.rate_factor)

    def _is_jump(self, norm: float) -> bool:
        known = self._norms
        return known.ready and norm > JUMP * known.mean > 0 and known.score(norm) > self._config.spike_zscore

    def _answer(self, way: str, anomaly: Anomaly, cause: str) -> Verdict:
        """The verdict on an anomaly that is to be met in that `way`."""
        config, rate_factor = self._config, self.rate_factor
        if way == "stop":
            return Verdict("stop", cause, anomaly, rate_factor)
        if way == "detect":
            return Verdict("step", cause, anomaly, rate_factor)
        if way == "roll_back":
            if self._rollbacks < config.max_rollbacks:
                return Verdict("roll_back", cause, anomaly, rate_factor)
            return Verdict("stop", f"{cause}, after {self._rollbacks} roll back(s)", anomaly, rate_factor)
        if self.bad_in_a_row >= config.max_skipped_steps:
            cause = f"{cause}, after {self.bad_in_a_row} skipped step(s) in a row"
            return Verdict("stop", cause, anomaly, rate_factor)
        if self._bad_in_all >= config.max_skipped_total:
            cause = f"{cause}, after {self._bad_in_all} skipped step(s) in all"
            return Verdict("stop", cause, anomaly, rate_factor)
        if way == "lower_rate":
            rate_factor *= config.rate_factor
            cause = f"{cause}; the learning rate is lowered to {rate_factor:g} of the schedule's"
        return Verdict("zero" if way == "zero" else "skip", cause, anomaly, rate_factor)

    def _remember(self, numbers: StepNumbers) -> None:
        """A spike counts as no more than one just not: it must not hide the next, but a new level is learnt."""
        threshold = self._config.spike_zscore
        limit = self._losses.limit(threshold) if self._losses.ready else self.trend.bound
        self._losses.add(min(numbers.loss, limit))
        self._norms.add(min(numbers.grad_norm, max(JUMP * self._norms.mean, self._norms.limit(threshold))))

    def to_state(self) -> dict[str, Any]:
        return {
            "losses": self._losses.to_state(),
            "norms": self._norms.to_state(),
            "bad_in_a_row": self.bad_in_a_row,
            "bad_in_all": self._bad_in_all,
            "rollbacks": self._rollbacks,
            "last_anomaly": self.last_anomaly,
            "rate_factor": self.rate_factor,
            "trend": self.trend.to_state(),
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._losses.from_state(state["losses"])
        self._norms.from_state(state["norms"])
        self.bad_in_a_row, self._bad_in_all = state["bad_in_a_row"], state["bad_in_all"]
        self._rollbacks = state["rollbacks"]
        self.last_anomaly, self.rate_factor = state["last_anomaly"], state["rate_factor"]
        if "trend" in state:  # not of checkpoints that an earlier version wrote
            self.trend.from_state(state["trend"])


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
