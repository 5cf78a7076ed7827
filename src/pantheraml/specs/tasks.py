"""Requests to and results of worker tasks other than training; a request is the `request.json` of a task folder."""

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
    """Request on a run folder that may come from someone else."""

    consent: Consent


class GenerateRequest(ReceivedRequest):
    """Generate completions for prompts; each rank writes its own to `answers-RANK.jsonl`."""

    prompts: list[str]
    weights: Literal["trained", "base"]
    """base: the model before the run, for comparison."""
    device: Literal["cpu", "cuda"]
    precision: Precision
    max_new_tokens: int
    temperature: float
    seed: int
    batch_size: int


class PreviewRequest(Request):
    """Tokenize the first rows of a data file as a run would; the result is written to `preview.json`."""

    model: Path
    data: Path
    format: str
    seq_len: int
    rows: int


class VerifyRequest(Request):
    """Run the first steps in each mode and in one process; the result is written to `verdicts.json`."""

    modes: dict[str, ParallelDims]
    steps: int
    explicit: bool
    """The user named the modes: an unsupported one is an error, not a line in the table."""


class ModeVerdict(BaseModel):
    """Comparison of a mode with one process on the same global batches."""

    mode: str
    dims: ParallelDims
    batch_shares: list[int] | None = None
    """Samples of a global batch per data parallel rank, from the config; None: even."""
    not_possible: str | None = None
    """Why the run cannot use this mode; nothing was measured then."""
    loss: float | None = None
    """Largest relative difference in the loss of a step."""
    gradient: float | None = None
    """Largest relative difference in the gradient of a parameter, at the first step."""
    weights: float | None = None
    """Relative difference in the trained weights after the last step."""
    seconds: float | None = None
    """Median step time, without the first step."""
    passed: bool | None = None


class Verdicts(BaseModel):
    """Result of `verify`."""

    device: str
    precision: str
    steps: int
    tolerance: float
    """Tolerance for loss and gradient."""
    weights_tolerance: float
    tolerance_reason: str
    seconds_of_one: float
    """Median step time of one process."""
    notes: list[str]
    """Differences between the compared steps and those of the run."""
    modes: list[ModeVerdict]

    @property
    def passed(self) -> bool:
        return all(verdict.passed is not False for verdict in self.modes)


class TorchFacts(BaseModel):
    """Torch's version and devices, reported by a separate process (`doctor`)."""

    version: str
    cuda: str | None
    """CUDA version that it is built for; None: a build for CPUs."""
    nccl: str | None
    gpus: int
    problem: str | None
    """Why it cannot use a GPU, in its words; None: it can, or it sees none."""


class CollectiveRequest(Request):
    """Join the plan's ranks and all-reduce once; the result is written to `collective.json`."""

    timeout_seconds: float


class CollectiveResult(BaseModel):
    """Result of the ranks' all-reduce (`doctor`)."""

    processes: int
    backend: str
    bytes: int
    """Size of the all-reduced tensor."""
    seconds: float
    """Best of a few all-reduces."""


class ProfileRequest(Request):
    """Run some steps under a profiler; the result is written to `profile.json`, and with `trace` also `trace.json`."""

    steps: int
    warmup: int
    trace: bool


class ProfileRow(BaseModel):
    """One line of a profile, for each step."""

    name: str
    seconds: float
    share: float
    """Sum over all lines of its table."""
    calls: float


class ProfileResult(BaseModel):
    """Result of `profile`, of rank 0."""

    device: str
    precision: str
    world_size: int
    steps: int
    warmup: int
    step_seconds: float
    tokens_per_second: float
    """Of all ranks."""
    memory_bytes: int
    """Peak memory of the GPU, or of the process on a CPU."""
    phases: list[ProfileRow]
    """Where the time of a step goes; they add up to it."""
    parts: list[ProfileRow]
    """Work of the device by kind, with operators of the same kind added up."""
    operators: list[ProfileRow]
    """The slowest operators, or kernels on a GPU."""


class ReplayRequest(ReceivedRequest):
    """Rerun the step of an incident in one process; the result is written to `replay.json`."""

    incident: Path
    plan: Plan


class ReplayResult(BaseModel):
    """Findings of a rerun of an incident's step, next to the original ones."""

    step: int
    cause: str
    recorded: str
    """Original findings."""
    found: str
    """Findings of the rerun."""
    weights: str
    """Weights used for the rerun."""
    loss: str
    """Loss of the rerun, as text because it may not be finite."""
    same: bool


class ExportRequest(ReceivedRequest):
    """Export the trained model as a plain Hugging Face folder, or as a GGUF file."""

    output: Path
    precision: Precision
    gguf: str | None = None
    """Kind of the GGUF file to write; None: a folder."""
    base: Literal["trained", "plain"]
    """plain: merge an adapter trained on 4-bit weights into the unquantized weights."""


class QuantizeRequest(Request):
    """Quantize a model to nf4, calibrated on the first text of a run's data; the result is written to
    `quantized.json`."""

    output: Path
    tokens: int
    """Calibration tokens, or fewer if the data has fewer."""


class QuantizeResult(BaseModel):
    """Result of `quantize`."""

    output: Path
    layers: int
    """Number of quantized linear layers."""
    share: float
    """Fraction of all weights in these layers."""
    tokens: int
    """Calibration tokens used."""
    left: float | None
    """Squared output error left, relative to round-to-nearest, on the calibration text; mean over layers. None:
    round-to-nearest has no error."""
    bytes: int
    """Size of all weights in the folder."""
    seconds: float
