"""Step policy: turn the gathered numbers of a step into a verdict that is identical on every rank.

Between backward and the optimizer step all ranks decide to step, zero, skip, roll back or stop. Every rank computes the
verdict from the same gathered numbers, so they cannot disagree.

    nonfinite    NaN or infinity in a loss or a gradient: `stability.on_nonfinite`
    spike        a loss far above the recent ones or, before there are enough, above any loss of a run that learns:
                 `stability.on_spike`
    jump         a gradient norm far above the recent ones, such as after a bit flip: `stability.on_spike`
    left_out     gradients of some ranks are not finite and were excluded (`parallel.leave_out_nonfinite`): step
    overflow     under fp16 a gradient is not finite: the step is retried with a smaller loss scale, and counts as
                 nonfinite only if a scale of 1 does not help

Skips and rollbacks are bounded, both consecutive and total. The state consists of plain numbers, equal on all ranks,
and is saved in checkpoints.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pantheraml.parallel.local_shards import NamedParameters
from pantheraml.specs.train import StabilityConfig

Action = Literal["step", "retry", "zero", "skip", "roll_back", "stop"]
"""retry: rerun forward and backward; zero: step with non-finite gradient values set to 0; roll_back: skip the step and
continue from the weights of an older checkpoint."""

Anomaly = Literal["overflow", "nonfinite", "spike", "jump", "left_out"]
"""overflow: of fp16's loss scale, expected now and then; jump: of the gradient norm; left_out: the non-finite gradients
of some ranks were excluded."""

LEAST_SPREAD = 0.01
"""Lower bound of the standard deviation, relative to the mean: a nearly constant number would flag its own noise."""

# LossTrend
DIVERGED = 1.5
"""Factor above max(largest loss so far, ln V) from which a loss has diverged."""
RECENT = 10
"""Losses whose median is the final loss; in a short run, the last quarter."""
FIRST = 5
"""Losses whose maximum is the initial loss, since batches differ; losses after a divergence do not count."""
ABOVE, ABOVE_BY = 1.25, 0.1
"""Relative and absolute margin by which the final loss must exceed the initial one to cause concern."""
NEAR = 0.03
"""Relative distance from ln V within which a loss counts as a uniform guess."""
ENOUGH_STEPS = 20
"""Before that many steps, a model trained from scratch may still be guessing."""

# Policy
LOSS_DECAY = 0.98
"""A loss is compared with about the last 50."""
NORM_DECAY, NORM_WARMUP = 0.95, 5
"""A gradient norm is compared with about the last 20, after 5 steps: a false alarm costs one more forward/backward."""
JUMP = 10.0
"""Factor above the mean of recent gradient norms, which scatter far more than losses; clipping handles the rest."""


@dataclass(frozen=True)
class StepNumbers:
    """Gathered numbers of a step before it is applied; per-rank values are lists in rank order."""

    loss_sums: list[float]
    grad_norm: float
    target_tokens: int
    stop_requested: bool
    update_ratio: float | None = None
    """Norm of the last measured update over that of the weights; None if none was measured since the previous step."""
    left_out: tuple[int, ...] = ()
    """Ranks whose gradient was not finite and was excluded."""

    # Cached: each is read several times while the GPU waits for the decision.

    @cached_property
    def loss(self) -> float:
        return math.fsum(self.loss_sums) / max(1, self.target_tokens)

    @cached_property
    def bad_ranks(self) -> list[int]:
        return [rank for rank, value in enumerate(self.loss_sums) if not math.isfinite(value)]

    @property
    def gradients_finite(self) -> bool:
        """Whether the gradients of all ranks are finite, including the excluded ones."""
        return math.isfinite(self.grad_norm) and not self.left_out

    @cached_property
    def finite(self) -> bool:
        return not self.bad_ranks and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Verdict:
    action: Action
    cause: str
    anomaly: Anomaly | None = None
    """None for a healthy step."""
    rate_factor: float = 1.0
    """Factor on the scheduled learning rate from this step on."""


class MovingStatistics:
    """Mean and variance: plain over the first `warmup` values, exponentially weighted from then on."""

    def __init__(self, *, decay: float, warmup: int) -> None:
        self._decay, self._warmup = decay, warmup
        self._count, self.mean, self._variance = 0, 0.0, 0.0

    @property
    def ready(self) -> bool:
        return self._count >= self._warmup

    @property
    def std(self) -> float:
        """Standard deviation, at least `LEAST_SPREAD` of the mean."""
        return max(math.sqrt(self._variance), LEAST_SPREAD * abs(self.mean))

    def score(self, value: float) -> float:
        """Z-score of `value`; 0 during warmup."""
        if not self.ready:
            return 0.0
        above = value - self.mean
        if self.std == 0.0:
            return math.inf if above > 0 else 0.0
        return above / self.std

    def limit(self, score: float) -> float:
        """Value with z-score `score`; infinite during warmup."""
        return self.mean + score * self.std if self.ready else math.inf

    def add(self, value: float) -> None:
        self._count += 1
        keep = self._decay if self._count > self._warmup else 1 - 1 / self._count
        delta = value - self.mean
        self.mean += (1 - keep) * delta
        self._variance = keep * (self._variance + (1 - keep) * delta**2)

    def to_state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self.mean, "variance": self._variance}

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._count, self.mean, self._variance = state["count"], state["mean"], state["variance"]


class LossTrend:
    """Detects divergence before there are enough losses for z-scores, and at the end of a run.

    Every run has two reference points: its first loss, and ln V, the loss of a uniform guess among V tokens. A run may
    start above ln V, and batches of few tokens scatter, but a run that learns neither goes far above both nor ends
    there.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        """`vocabulary`: vocabulary size; None: unknown, which disables most checks."""
        self._vocabulary = vocabulary
        self._first: float | None = None
        self._begun, self._peak, self._count, self._diverged = 0.0, 0.0, 0, False
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def _guess(self) -> float:
        return math.log(self._vocabulary) if self._vocabulary else math.inf

    @property
    def bound(self) -> float:
        """Upper bound on the losses of a run that learns."""
        return math.inf if self._first is None else DIVERGED * max(self._peak, self._guess)

    def cause(self, loss: float) -> str | None:
        """Message about a loss above the bound; None if it is within."""
        if loss <= self.bound:
            return None
        return (
            f"the loss {loss:.4g} is far above that of the first step ({self._first:.4g}) and of a uniform guess"
            f" ({self._guess:.4g})"
        )

    def add(self, loss: float, *, taken: bool) -> None:
        """`taken`: the optimizer step was applied, so later losses may be compared with this one."""
        if loss > self.bound:
            self._diverged = True
        if self._count < FIRST and not self._diverged:
            self._begun = max(self._begun, loss)
        self._first = loss if self._first is None else self._first
        if taken:
            self._peak = max(self._peak, loss)
        self._count += 1
        self._recent.append(loss)

    def concern(self) -> str | None:
        """Message for a run whose final loss is no better than its initial one; None if it is."""
        if self._first is None or self._count < 2 or not (self._diverged or self._count >= RECENT):
            return None
        final = statistics.median(list(self._recent)[-max(1, self._count // 4) :])
        lower = "a lower train.learning_rate may help"
        stuck = self._count >= ENOUGH_STEPS and final > (1 - NEAR) * self._begun
        if abs(final / self._guess - 1) <= NEAR and (self._diverged or stuck):
            fix = lower if self._diverged else "a higher train.learning_rate, or more steps, may help"
            return (
                f"the loss ended at {final:.4g}, that of a uniform guess among {self._vocabulary} tokens"
                f" ({self._guess:.4g}), and began at {self._first:.4g}; {fix}"
            )
        if final > max(ABOVE * self._begun, self._begun + ABOVE_BY):
            return f"the loss ended at {final:.4g}, above the initial {self._begun:.4g}; {lower}"
        return None

    def to_state(self) -> dict[str, Any]:
        return {
            "first": self._first,
            "begun": self._begun,
            "peak": self._peak,
            "count": self._count,
            "diverged": self._diverged,
            "recent": list(self._recent),
        }

    def from_state(self, state: Mapping[str, Any]) -> None:
        self._first, self._begun = state["first"], state["begun"]
        self._peak, self._count = state["peak"], state["count"]
        self._diverged, self._recent = state["diverged"], deque(state["recent"], maxlen=RECENT)


class Policy:
    def __init__(self, config: StabilityConfig, vocabulary: int | None = None) -> None:
        """`vocabulary`: vocabulary size of the model."""
        self._config = config
        self.trend = LossTrend(vocabulary)
        self._losses = MovingStatistics(decay=LOSS_DECAY, warmup=config.spike_warmup_steps)
        self._norms = MovingStatistics(decay=NORM_DECAY, warmup=NORM_WARMUP)
        self.bad_in_a_row = 0
        """Consecutive skipped or zeroed steps up to the last one."""
        self._bad_in_all = 0
        self._rollbacks = 0
        self.last_anomaly: Anomaly | None = None
        """Anomaly of the last step."""
        self.rate_factor = 1.0
        """Factor on the scheduled learning rate."""

    def decide(self, numbers: StepNumbers, *, loss_scale: float | None) -> Verdict:
        """Decide on a step and update the statistics; call once per step. `loss_scale`: None without loss scaling."""
        return self.settle(self.look(numbers, loss_scale=loss_scale), numbers)

    def settle(self, verdict: Verdict, numbers: StepNumbers) -> Verdict:
        """Commit a verdict of `look` as the decision on the step."""
        if verdict.action in ("stop", "retry"):
            return verdict  # the step will be rerun, here or after a resume: it must not count twice
        # After a rollback the steps run on other weights, so the next anomaly has a cause of its own.
        self.last_anomaly = None if verdict.action == "roll_back" else verdict.anomaly
        self._rollbacks += verdict.action == "roll_back"
        self.rate_factor = verdict.rate_factor
        if numbers.finite:
            self._update_statistics(numbers)
            self.trend.add(numbers.loss, taken=verdict.action == "step")
        if verdict.action == "step":
            self.bad_in_a_row = 0
        else:
            self.bad_in_a_row += 1
            self._bad_in_all += 1
        return verdict

    def look(self, numbers: StepNumbers, *, loss_scale: float | None) -> Verdict:
        """Return the verdict that `decide` would give, without updating any state."""
        config = self._config
        if numbers.bad_ranks:
            cause = f"the loss is not finite on rank {_join(numbers.bad_ranks)}"
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
            cause = f"the gradient of rank {_join(numbers.left_out)} is not finite and is excluded"
            return Verdict("step", cause, "left_out", self.rate_factor)
        return Verdict("step", "loss and gradient are finite", rate_factor=self.rate_factor)

    def _is_jump(self, norm: float) -> bool:
        norms = self._norms
        return norms.ready and norm > JUMP * norms.mean > 0 and norms.score(norm) > self._config.spike_zscore

    def _answer(self, response: str, anomaly: Anomaly, cause: str) -> Verdict:
        """Verdict on an anomaly, given the configured `response` to it."""
        config, rate_factor = self._config, self.rate_factor
        if response == "stop":
            return Verdict("stop", cause, anomaly, rate_factor)
        if response == "detect":
            return Verdict("step", cause, anomaly, rate_factor)
        if response == "roll_back":
            if self._rollbacks < config.max_rollbacks:
                return Verdict("roll_back", cause, anomaly, rate_factor)
            return Verdict("stop", f"{cause}, after {self._rollbacks} rollback(s)", anomaly, rate_factor)
        if self.bad_in_a_row >= config.max_skipped_steps:
            cause = f"{cause}, after {self.bad_in_a_row} skipped step(s) in a row"
            return Verdict("stop", cause, anomaly, rate_factor)
        if self._bad_in_all >= config.max_skipped_total:
            cause = f"{cause}, after {self._bad_in_all} skipped step(s) in total"
            return Verdict("stop", cause, anomaly, rate_factor)
        if response == "lower_rate":
            rate_factor *= config.rate_factor
            cause = f"{cause}; the learning rate is lowered to {rate_factor:g} of the schedule's"
        return Verdict("zero" if response == "zero" else "skip", cause, anomaly, rate_factor)

    def _update_statistics(self, numbers: StepNumbers) -> None:
        """Add loss and norm, clamped at the anomaly threshold: a spike must not mask the next one, but the statistics
        still adapt to a new level."""
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
        if "trend" in state:  # absent from checkpoints of earlier versions
            self.trend.from_state(state["trend"])


def _join(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class Suspect(NamedTuple):
    """The gradient that best explains an anomaly, as seen by one rank."""

    size: float
    """Largest absolute value; infinite if some value is not finite."""
    number: int
    """Index among this rank's parameters."""
    name: str


def find_suspect(parts: NamedParameters, anomaly: Anomaly | None) -> Suspect | None:
    """Return the first non-finite gradient of `parts`, else (for nonfinite, spike and jump) the largest one.

    Finite values can have an infinite norm, and a spike or jump has a gradient that is too large.
    """
    numbered = [
        (number, name, part.grad)
        for number, (name, part) in enumerate(parts)
        if part.grad is not None and part.grad.numel() > 0
    ]
    bad = next(((number, name) for number, name, gradient in numbered if not bool(gradient.isfinite().all())), None)
    if bad is not None:
        return Suspect(math.inf, *bad)
    if anomaly not in ("nonfinite", "spike", "jump") or not numbered:
        return None
    return max(Suspect(float(gradient.abs().max()), number, name) for number, name, gradient in numbered)


def first_nonfinite(named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Name of the first tensor (in model order) that contains NaN or infinity."""
    return next((name for name, tensor in named if not bool(tensor.isfinite().all())), None)
