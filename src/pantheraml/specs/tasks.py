"""What a worker is asked beside training: the `request.json` of a task folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict

from pantheraml.base.folders import write_text
from pantheraml.specs.consent import Consent
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan

Precision = Literal["fp32", "bf16", "fp16"]


class Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run_dir: Path

    def write(self, folder: Path) -> None:
        write_text(folder / "request.json", self.model_dump_json(indent=1))

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls.model_validate(json.loads((folder / "request.json").read_text()))


class ReceivedRequest(Request):
    """Of a run folder that may be somebody else's."""

    consent: Consent


class GenerateRequest(ReceivedRequest):
    """Completions for prompts; the answers go to `answers.jsonl` of the task folder."""

    prompts: list[str]
    weights: Literal["trained", "base"]
    """base: the model as it was before the run, for comparison."""
    device: Literal["cpu", "cuda"]
    precision: Precision
    max_new_tokens: int
    temperature: float
    seed: int
    batch_size: int


class VerifyRequest(Request):
    """The first steps of a run in each mode and in one process; the answer goes to `verdicts.json`."""

    modes: dict[str, ParallelDims]
    steps: int
    asked: bool
    """The modes were named by the user: one that the model cannot do is an error, not a line in the table."""


class ModeVerdict(BaseModel):
    """How a mode compares with one process on the same global batches."""

    mode: str
    dims: ParallelDims
    batch_shares: list[int] | None = None
    """Samples of a global batch for each share of it, as the config says; None: evenly."""
    not_possible: str | None = None
    """Why the run cannot be divided that way; nothing was measured then."""
    loss: float | None = None
    """Largest relative difference of a step's loss."""
    gradient: float | None = None
    """Largest relative difference of a parameter's gradient, at the first step."""
    weights: float | None = None
    """Relative difference of the trained weights after the last step."""
    seconds: float | None = None
    """Median of the steps after the first."""
    passed: bool | None = None


class Verdicts(BaseModel):
    """What `verify` found."""

    device: str
    precision: str
    steps: int
    tolerance: float
    """Of loss and gradient."""
    weights_tolerance: float
    tolerance_reason: str
    seconds_of_one: float
    """Median seconds of a step in one process."""
    notes: list[str]
    """In what the compared steps differ from those of the run."""
    modes: list[ModeVerdict]

    @property
    def passed(self) -> bool:
        return all(verdict.passed is not False for verdict in self.modes)


class ReplayRequest(ReceivedRequest):
    """The step of an incident once more, in one process; the answer goes to `replay.json`."""

    incident: Path
    plan: Plan


class ReplayResult(BaseModel):
    """What was found when the step of an incident was run again, beside what was recorded."""

    step: int
    cause: str
    recorded: str
    """What was found out when it happened."""
    found: str
    """What was found now."""
    weights: str
    """Which weights the step was run with."""
    loss: str
    """Of the step, now; as text, for it may not be finite."""
    same: bool


class ExportRequest(ReceivedRequest):
    """The trained model as a plain Hugging Face folder."""

    output: Path
    precision: Precision
    base: Literal["trained", "plain"]
    """plain: an adapter that was trained over 4-bit weights is merged into the unquantized ones."""


class QuantiseRequest(Request):
    """A model's weights in nf4, rounded by what the first text of a run's data makes of its layers; what was done goes
    to `quantised.json`."""

    output: Path
    tokens: int
    """Of the text, or as many as there are."""


class Quantised(BaseModel):
    """What `quantise` did."""

    output: Path
    layers: int
    """Linear layers whose weights were rounded."""
    share: float
    """Of all weights, that are in them."""
    tokens: int
    """That they were rounded by."""
    left: float | None
    """Of what rounding to the nearest values would change of products on this text, squared; the mean over layers.
    None: that would change nothing."""
    bytes: int
    """Of all weights in the folder."""
    seconds: float
