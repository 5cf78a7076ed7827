"""Current state of a run, from its events, for live screens."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from pantheraml.base.events import (
    CheckpointSaved,
    DataProgress,
    DataReady,
    ErrorRaised,
    EvalDone,
    EvalProgress,
    EventBase,
    GPUHealthChanged,
    HardwareFound,
    HardwareSampled,
    IncidentRecorded,
    ModelReady,
    Notice,
    PlanMade,
    RanksLeftOut,
    RunFallback,
    RunFinished,
    RunRestarted,
    RunStarted,
    TrainFinished,
    TrainStarted,
    TrainStep,
    VerdictReached,
    WarningIssued,
)

MAX_POINTS = 4096
"""Number of losses kept; beyond it, every second one is dropped, so that the sparkline covers the whole run."""
MAX_MESSAGES = 50


@dataclass(frozen=True)
class LogMessage:
    time: float
    level: str
    """info, warn or error."""
    text: str


@dataclass
class RunState:
    """A `Reader` that keeps the latest values. None: not known yet."""

    output: Path = field(default_factory=Path)
    status: str = "starting"
    activity: str = "starting"
    """Name of the work in progress."""
    done: float = 0.0
    total: float | None = None
    training: TrainStarted | None = None
    step: TrainStep | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluation: EvalDone | None = None
    checkpoint: CheckpointSaved | None = None
    plan: PlanMade | None = None
    model: ModelReady | None = None
    hardware: HardwareFound | None = None
    sample: HardwareSampled | None = None
    error: ErrorRaised | None = None
    finished: RunFinished | None = None
    messages: deque[LogMessage] = field(default_factory=lambda: deque(maxlen=MAX_MESSAGES))
    last_time: float | None = None
    """Time of the last event, by the clock of the run's host."""
    _stride: int = 1

    def handle(self, event: EventBase) -> None:
        self.last_time = event.time
        if isinstance(event, RunStarted):
            self.status, self.activity, self.finished, self.error = "running", "starting", None, None
            self.output = Path(event.output)
        elif isinstance(event, DataProgress):
            self._work(f"{event.split} data: {event.stage}", event.done, event.total)
        elif isinstance(event, DataReady):
            self._work("loading the model", 0, None)
        elif isinstance(event, EvalProgress):
            self._work("evaluating", event.done, event.total)
        elif isinstance(event, RunFinished):
            self.status, self.finished = event.status, event
        else:
            self._newest(event)
            self._tell(event)

    def close(self) -> None:
        """Nothing to close."""

    def remaining_seconds(self) -> float | None:
        """Estimate from the pace of this start; None before its second logged step."""
        if self.training is None or self.step is None or self.finished is not None:
            return None
        gained = self.step.step - self.training.first_step + 1
        left = self.training.total_steps - self.step.step
        elapsed = self.step.moment - self.training.moment
        return left * elapsed / gained if gained > 1 and elapsed > 0 else None

    def _total(self) -> int | None:
        return None if self.training is None else self.training.total_steps

    def _work(self, activity: str, done: float, total: float | None) -> None:
        self.activity, self.done, self.total = activity, done, total

    def _newest(self, event: EventBase) -> None:
        if isinstance(event, TrainStarted):
            self.training = event
            self._work("training", event.first_step - 1, event.total_steps)
            self.losses = [(step, loss) for step, loss in self.losses if step < event.first_step]
        elif isinstance(event, TrainStep):
            self.step = event
            self._work("training", event.step, self._total())
            self._keep(event)
        elif isinstance(event, EvalDone):
            self.evaluation = event
            if self.step is not None:
                self._work("training", self.step.step, self._total())
        elif isinstance(event, TrainFinished):
            self._work("saving", event.steps, self._total())
        elif isinstance(event, CheckpointSaved):
            self.checkpoint = event
        elif isinstance(event, PlanMade):
            self.plan = event
        elif isinstance(event, ModelReady):
            self.model = event
        elif isinstance(event, HardwareFound):
            self.hardware = event
        elif isinstance(event, HardwareSampled):
            self.sample = event

    def _keep(self, event: TrainStep) -> None:
        if event.step % self._stride == 0 or not self.losses:
            self.losses.append((event.step, event.loss))
        if len(self.losses) > MAX_POINTS:
            self.losses = self.losses[::2]
            self._stride *= 2

    def _tell(self, event: EventBase) -> None:
        text, level = None, "warn"
        if isinstance(event, WarningIssued | RunRestarted | RunFallback):
            text = event.message
        elif isinstance(event, Notice):
            text, level = event.message, "info"
        elif isinstance(event, GPUHealthChanged):
            text, level = event.message, "info" if event.status == "ok" else "warn"
        elif isinstance(event, VerdictReached):
            text = f"step {event.step}: {event.action} ({event.cause})"
        elif isinstance(event, IncidentRecorded):
            text = f"step {event.step}: {event.finding}; see {event.path}"
        elif isinstance(event, RanksLeftOut):
            text = f"step {event.step}: the gradient of ranks {event.ranks} is not finite and was left out"
        elif isinstance(event, TrainFinished):
            text = event.concern
        elif isinstance(event, ErrorRaised):
            text, level = f"{event.error}: {event.what}", "error"
            self.error = self.error or event
        if text:
            self.messages.append(LogMessage(event.time, level, text))
