"""Typed events: all communication between a run or task and its readers, one model per kind.

Workers and the supervisor append events to `events.jsonl` (`event_stream`); progress bar, `run.json`, `report.html` and
the sinks read them and nothing else. `pantheraml schema --events` prints the JSON schema. Fields may be added without a
new schema version, so readers ignore fields that they do not know; unknown kinds are read as `UnknownEvent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter

from pantheraml.base.errors import PantheraError

SCHEMA_VERSION = 1

Number = float
"""NaN and infinity are written as strings, since JSON has neither; reading gives floats again."""


MAX_TIME = 250e9
"""In the year 9892: a date that Python can print, wherever a stream came from."""


class EventBase(BaseModel):
    """Fields of every event; the writer fills them in."""

    model_config = ConfigDict(extra="ignore", ser_json_inf_nan="strings")

    v: int = SCHEMA_VERSION
    time: Annotated[float, Field(ge=0, le=MAX_TIME, allow_inf_nan=False)] = 0.0
    """Seconds since 1970, by a clock that may be set."""
    clock: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Seconds by the host's monotonic clock; None in streams of early versions."""
    rank: int | None = 0
    kind: str

    @property
    def moment(self) -> float:
        """Time for differences between events of one host, unaffected by changes of its date."""
        return self.time if self.clock is None else self.clock


class RunStarted(EventBase):
    kind: Literal["run.started"] = "run.started"
    command: str
    pantheraml: str
    """Version."""
    output: str


class RunRestarted(EventBase):
    """Processes failed and were restarted."""

    kind: Literal["run.restarted"] = "run.restarted"
    message: str
    step: int | None
    """Step of the checkpoint they continue from; None: from the beginning."""
    world_size: int


class RunFallback(EventBase):
    """Some rank could not use its device, and all agreed that rank 0 continues alone."""

    kind: Literal["run.fallback"] = "run.fallback"
    message: str
    reason: str
    planned_world_size: int


class RunFinished(EventBase):
    kind: Literal["run.finished"] = "run.finished"
    status: str
    """succeeded, failed, crashed, stopped or preempted."""
    seconds: float


class PlanMade(EventBase):
    kind: Literal["plan.made"] = "plan.made"
    plan: dict[str, Any]


class ChoiceMade(EventBase):
    """One more automatic choice like those of the plan, made when the model was loaded."""

    kind: Literal["choice"] = "choice"
    name: str
    value: Any
    reason: str
    automatic: bool


class GPUIdentity(BaseModel):
    """None: not reported by the driver."""

    index: int
    name: str
    uuid: str | None
    total_bytes: int | None
    power_limit_watts: float | None
    health: str | None = None
    """ok, warn or fail when the run started."""


class HardwareFound(EventBase):
    """The host of the run and the GPUs that it uses; those of other nodes are not known here."""

    kind: Literal["hardware.found"] = "hardware.found"
    host: str
    driver: str | None
    cuda: str | None
    gpus: list[GPUIdentity] = []
    cpu_count: int
    ram_bytes: int


class HardwareSampled(EventBase):
    """GPUs and host over the last `seconds`. Lists have one entry per GPU, in the order of `indices`; None: unknown.

    The interval grows with the age of the run, from one second to thirty.
    """

    kind: Literal["hardware.sampled"] = "hardware.sampled"
    seconds: float
    samples: int
    """Number of readings that are summarized."""
    indices: list[int] = []
    utilization_percent: list[float | None] = []
    """Mean."""
    memory_bytes: list[int | None] = []
    """Highest use, by all processes."""
    temperature_celsius: list[int | None] = []
    """Highest."""
    memory_temperature_celsius: list[int | None] = []
    """Highest."""
    power_watts: list[float | None] = []
    """Mean."""
    sm_clock_mhz: list[int | None] = []
    """Mean."""
    energy_joules: list[float | None] = []
    """Used in the interval."""
    nvlink_bytes: list[int | None] = []
    """Sent and received in the interval."""
    pcie_bytes: list[int | None] = []
    """Sent and received in the interval."""
    event_reasons: list[list[str] | None] = []
    """Why clocks were below their maximum."""
    cpu_percent: float | None
    """Mean over all cores."""
    ram_bytes: int
    """Highest use of the host's memory."""


class GPUHealthChanged(EventBase):
    """The first health of a GPU, if it is not ok, and every change."""

    kind: Literal["gpu.health"] = "gpu.health"
    index: int
    status: str | None
    """ok, warn or fail; None: not reported by the driver."""
    reasons: list[str] = []

    @property
    def message(self) -> str:
        reasons = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"health of GPU {self.index} is {self.status or 'not known'}{reasons}"


class DataProgress(EventBase):
    kind: Literal["data.progress"] = "data.progress"
    split: str
    stage: str
    done: float
    total: float | None
    unit: str


class DataReady(EventBase):
    kind: Literal["data.ready"] = "data.ready"
    split: str
    format: str
    rows: int
    skipped_rows: int
    truncated_rows: int
    tokens: int
    target_tokens: int
    sequences: int
    seq_len: int
    packing: bool
    efficiency: float | None
    fingerprint: str
    cached: bool
    seconds: float


class ModelReady(EventBase):
    kind: Literal["model.ready"] = "model.ready"
    architecture: str
    parameters: int
    trainable_parameters: int
    precision: str
    frozen_weights: str | None = None
    seconds: float


class TrainStarted(EventBase):
    kind: Literal["train.started"] = "train.started"
    first_step: int
    total_steps: int
    world_size: int
    device: str
    global_batch_size: int


class TrainStep(EventBase):
    """A logged step. tokens, target_tokens and seconds cover all steps since the last event of this kind."""

    kind: Literal["train.step"] = "train.step"
    step: int
    epoch: float
    loss: Number
    learning_rate: float | None
    grad_norm: Number | None
    tokens: int
    target_tokens: int
    seconds: float
    tokens_per_second: float | None
    memory_bytes: int | None
    update_ratio: Number | None = None
    aux_loss: Number | None = None
    """Load-balancing loss of mixture-of-experts models."""


class TrainRanks(EventBase):
    """Per-rank figures of a step, in rank order."""

    kind: Literal["train.ranks"] = "train.ranks"
    step: int
    tokens: Sequence[float]
    seconds: Sequence[float | None] | None
    """Excluding waits for other ranks; None if not measured."""
    memory_bytes: Sequence[int | None] | None


class MemoryMeasured(EventBase):
    """Memory of a GPU after the first two steps of a start, beside the plan's; None: not predicted."""

    kind: Literal["memory.measured"] = "memory.measured"
    step: int
    allocated_bytes: int
    """Most that torch allocated, of the rank that uses most."""
    reserved_bytes: int
    """Most that torch's allocator held on rank 0's GPU."""
    device_bytes: int
    """In use on rank 0's GPU by all processes, as the driver counts."""
    capacity_bytes: int
    predicted_bytes: int | None
    """For `allocated_bytes`."""
    predicted_device_bytes: int | None


class Heartbeat(EventBase):
    """Written by every rank periodically while it makes progress."""

    kind: Literal["heartbeat"] = "heartbeat"
    step: int | None


class TrainGroups(EventBase):
    """grad_norm and weight_norm of each group of parameters, such as a layer; written periodically."""

    kind: Literal["train.groups"] = "train.groups"
    step: int
    groups: dict[str, Any]


class TrainStopped(EventBase):
    """This rank received a stop signal, after which all ranks stopped."""

    kind: Literal["train.stopped"] = "train.stopped"
    signal: str


class TrainFinished(EventBase):
    kind: Literal["train.finished"] = "train.finished"
    steps: int
    stopped_by: str
    concern: str | None = None
    """Why the final loss is suspicious; None if it is not."""
    reserved_bytes: int | None = None
    """Peak memory reserved by torch on rank 0's GPU (max_memory_reserved); None without a GPU."""


class EvalProgress(EventBase):
    kind: Literal["eval.progress"] = "eval.progress"
    step: int
    done: int
    total: int


class EvalDone(EventBase):
    kind: Literal["eval.done"] = "eval.done"
    step: int
    loss: Number
    perplexity: Number
    target_tokens: int | None
    """None if the trainer does not report it."""
    seconds: float


class CheckpointSaved(EventBase):
    kind: Literal["checkpoint.saved"] = "checkpoint.saved"
    step: int
    path: str
    bytes: int
    seconds: float
    stall_seconds: float | None = None
    """How long training waited for it."""
    best: bool


class CheckpointRemoved(EventBase):
    kind: Literal["checkpoint.removed"] = "checkpoint.removed"
    step: int
    path: str


class ModelSaved(EventBase):
    kind: Literal["model.saved"] = "model.saved"
    path: str
    form: str


class VerdictReached(EventBase):
    """A step that was not taken as usual."""

    kind: Literal["verdict"] = "verdict"
    step: int
    action: str
    cause: str
    anomaly: str | None = None
    transient: bool | None = None
    ranks: list[int] | None = None
    tensor: str | None = None
    samples: Any = None


class IncidentRecorded(EventBase):
    """The investigation of a bad step; `path` has the details. `rank` is the rank that caused it, if one did."""

    kind: Literal["incident"] = "incident"
    step: int
    path: str
    finding: str
    transient: bool | None = None
    module: str | None
    tensor: str | None
    samples: Any


class RanksLeftOut(EventBase):
    """Ranks whose gradient was not finite and did not enter the step (`parallel.leave_out_nonfinite`)."""

    kind: Literal["aggregation.left_out"] = "aggregation.left_out"
    step: int
    ranks: list[int]


class GenerateProgress(EventBase):
    kind: Literal["generate.progress"] = "generate.progress"
    done: int
    total: int


class GenerateDone(EventBase):
    kind: Literal["generate.done"] = "generate.done"
    prompts: int
    tokens: int
    seconds: float


class VerifyProgress(EventBase):
    kind: Literal["verify.progress"] = "verify.progress"
    done: int
    total: int
    mode: str


class QuantizeProgress(EventBase):
    kind: Literal["quantize.progress"] = "quantize.progress"
    stage: str
    done: int
    total: int


class Notice(EventBase):
    kind: Literal["notice"] = "notice"
    message: str


class WarningIssued(EventBase):
    kind: Literal["warning"] = "warning"
    message: str


class ErrorRaised(EventBase):
    """An error on its way from a worker to the supervisor and the report."""

    kind: Literal["error"] = "error"
    error: str
    """Class name (`base.errors`)."""
    what: str
    where: str | None
    fix: str | None = Field(default=None, validation_alias=AliasChoices("fix", "todo"))
    exit_code: int
    traceback: str | None = None

    @classmethod
    def of(cls, err: PantheraError, *, traceback: str | None = None) -> ErrorRaised:
        return cls(
            error=type(err).__name__,
            what=err.what,
            where=err.where,
            fix=err.fix,
            exit_code=err.exit_code,
            traceback=traceback,
        )


class UnknownEvent(EventBase):
    """An event of a kind that a newer version writes."""

    model_config = ConfigDict(extra="allow")


KINDS: dict[str, type[EventBase]] = {
    str(model.model_fields["kind"].default): model
    for model in EventBase.__subclasses__()
    if model is not UnknownEvent
}  # fmt: skip
"""Model of each kind."""

Event = (
    RunStarted | RunRestarted | RunFallback | RunFinished | PlanMade | ChoiceMade | DataProgress | DataReady
    | HardwareFound | HardwareSampled | GPUHealthChanged
    | ModelReady | TrainStarted | TrainStep | TrainRanks | MemoryMeasured | Heartbeat | TrainGroups | TrainStopped
    | TrainFinished
    | EvalProgress | EvalDone | CheckpointSaved | CheckpointRemoved | ModelSaved
    | VerdictReached | IncidentRecorded | RanksLeftOut
    | GenerateProgress | GenerateDone | VerifyProgress | QuantizeProgress | Notice | WarningIssued | ErrorRaised
)  # fmt: skip

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])


class Emit(Protocol):
    """Takes events; producers know nothing of files."""

    def __call__(self, event: EventBase, /) -> None: ...


def silent(event: EventBase, /) -> None:
    """An `Emit` that drops everything."""


def parse_event(values: dict[str, Any]) -> EventBase:
    """The event that a line of `events.jsonl` holds. Raises pydantic's ValidationError."""
    model = KINDS.get(values["kind"], UnknownEvent)
    return model.model_validate(values)


def event_schema() -> dict[str, Any]:
    """JSON schema of all kinds: a union discriminated by `kind`."""
    return _ADAPTER.json_schema(mode="serialization")
