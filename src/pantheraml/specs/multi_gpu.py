"""MultiGPUConfig: how the work is spread over processes and devices (section `parallel` of a TrainConfig)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from pantheraml.specs.other_names import translate_other_names
from pantheraml.specs.parallel import DIMENSIONS, Degree


def split_commas(value: object) -> object:
    """`2,2,2,15`, as people write lists on a command line, where a list of one is a number."""
    if isinstance(value, str) and "," in value:
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


class MultiGPUMode(StrEnum):
    """Values are what YAML, flags and REST write."""

    NONE = "none"
    DATAPARALLEL = "dataparallel"
    DISTRIBUTED = "distributed"
    HYBRID = "hybrid"
    AUTO = "auto"


Aggregation = Literal["mean", "weighted", "median", "trimmed_mean"]


@dataclass(config=ConfigDict(extra="forbid", use_attribute_docstrings=True), kw_only=True)
class MultiGPUConfig:
    mode: MultiGPUMode = MultiGPUMode.AUTO
    """none: one process; dataparallel: one process that copies the model to each GPU for every batch (simple, slow);
    distributed: one process per device, each with the whole model (DDP) unless degrees say otherwise; hybrid: two kinds
    of parallelism, see hybrid_strategy; auto: distributed when there is more than one device."""
    auto_policy: Literal["distributed", "simple"] = "distributed"
    """What mode=auto means: one process per GPU, or simple: dataparallel up to four GPUs, distributed beyond."""
    world_size: Annotated[int, Field(ge=1)] | None = None
    """Number of processes; None = one per visible GPU, or one on a machine without GPUs."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """Which of them this process is, for those who start each by hand; with world_size and local_rank. The environment
    variables MASTER_ADDR and MASTER_PORT say where they meet. None = as the launcher says."""
    local_rank: Annotated[int, Field(ge=0)] | None = None
    """Which of the processes of its machine this one is, and so which GPU it has; together with rank."""
    device_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, BeforeValidator(split_commas)] = None
    """GPU indices to use, as `pantheraml gpus` numbers them; None = all visible ones."""
    output_device: Annotated[int, Field(ge=0)] | None = None
    """With mode=dataparallel: the GPU that losses and gradients come together on, and that holds the weights and the
    optimizer's state; None = the first."""
    replicate: Degree | None = None
    """Copies of the model, each with other samples (DDP; with `shard`, HSDP); None = as many as processes allow."""
    shard: Degree | None = None
    """Parts that weights, gradients and optimizer state are cut into, each with other samples (FSDP2)."""
    tensor: Degree | None = None
    """Parts that every weight matrix is cut into (tensor parallel)."""
    pipeline: Degree | None = None
    """Groups of layers, one after another (pipeline parallel)."""
    context: Degree | None = None
    """Parts that every sequence is cut into (context parallel)."""
    auto_device_map: bool = False
    """The same as model.device_map=auto: one process spreads the layers of a model over its GPUs."""
    use_gradient_checkpointing: bool | Literal["unsloth"] | None = None
    """The same as train.activation_checkpointing: true = full, unsloth = offload, false = none; None: not said here."""
    hybrid_strategy: Literal["pipeline", "model_parallel", "data_parallel"] = "pipeline"
    """What mode=hybrid puts beside copies: pipeline stages, tensor parallel, or sharded weights."""
    stages_per_process: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages that each process holds: 1 is the 1F1B schedule, more the interleaved one (a smaller bubble)."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Communication between GPUs; processes on CPUs always use gloo."""
    aggregation: Aggregation = "mean"
    """How gradients of the copies become one: mean (over tokens: equal to one GPU), weighted (by aggregation_weights),
    median or trimmed_mean (robust against a few bad ranks; no longer equal to one GPU)."""
    aggregation_weights: Annotated[list[Annotated[float, Field(ge=0)]] | None, BeforeValidator(split_commas)] = None
    """One per copy, for aggregation=weighted."""
    leave_out_nonfinite: bool = False
    """Leave out a rank whose gradient is not finite and go on with the others, instead of judging the whole step."""
    batch_shares: Annotated[
        Literal["even", "adaptive"] | list[Annotated[int, Field(ge=0)]], BeforeValidator(split_commas)
    ] = "even"
    """How a global batch is split over copies: even; adaptive (a slower rank gets less); or sequences for each, such as
    2,2,2,15, which add up to train.global_batch_size."""
    check_every: Annotated[int, Field(ge=0)] = 100
    """Steps between two comparisons of the copies' weights and gradients; drift stops the run. 0: never."""
    find_unused_parameters: bool = False
    """DDP looks for parameters that a step did not use (slower); needed only when some are skipped."""
    gradient_as_bucket_view: bool = True
    """Gradients share memory with DDP's communication buckets."""
    broadcast_buffers: bool = True
    """DDP sends rank 0's buffers to all ranks before each forward pass."""
    static_graph: bool = True
    """Allow DDP's static graph; it is used where reentrant checkpointing needs it."""
    sync_bn: bool = True
    """Batch normalisation, where a model has it, over all ranks of a GPU run."""
    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """Size of a DDP communication bucket in MiB."""
    enable_multi_gpu_monitoring: bool = True
    """Events `train.ranks` tell tokens, seconds and memory of every rank, and the report shows them: a slow or full one
    is seen."""
    timeout_seconds: Annotated[int, Field(ge=1)] = 300
    """How long a rank waits for its peers before the run stops with an error."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """How often processes that could not meet try again; and how often in a row `pantheraml train` starts again from
    the last checkpoint for one of the reasons in restart_on."""
    restart_on: Annotated[tuple[Literal["killed", "failed", "hung"], ...], BeforeValidator(split_commas)] = ("killed",)
    """After what `pantheraml train` starts the processes again: one was killed, one failed with an error that nobody
    foresaw, one got no further for timeout_seconds."""
    min_world_size: Annotated[int, Field(ge=1)] | None = None
    """After max_retries starts in vain the run goes on with fewer processes, down to so many, and the same global
    batch; None = it stops."""
    strict: bool = False
    """Stop if a rank cannot use its device, instead of going on with one device after a warning."""
    grace_seconds: Annotated[int, Field(ge=1)] = 120
    """How long workers may take to save after Ctrl-C, SIGTERM or SIGUSR1 before they are killed."""

    @property
    def enable_hybrid(self) -> bool:
        return self.mode is MultiGPUMode.HYBRID

    @property
    def enable_fault_tolerance(self) -> bool:
        return self.max_retries > 0

    @model_validator(mode="before")
    @classmethod
    def _translate_other_names(cls, given: object) -> object:
        values = given.kwargs if isinstance(given, ArgsKwargs) else given
        if isinstance(values, dict):
            translate_other_names(values)
        return given

    @model_validator(mode="after")
    def _check_together(self) -> MultiGPUConfig:
        if (self.rank is None) != (self.local_rank is None) or (self.rank is not None and self.world_size is None):
            raise ValueError("parallel.rank, local_rank and world_size go together")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"parallel.rank={self.rank} is not a rank of parallel.world_size={self.world_size}")
        asked = [name for name in DIMENSIONS if getattr(self, name) is not None]
        if asked and self.mode in (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL, MultiGPUMode.HYBRID):
            raise ValueError(
                f"parallel.{asked[0]} is for mode=distributed or auto; mode={self.mode} decides about that by itself"
            )
        if self.mode is MultiGPUMode.DATAPARALLEL:
            for name, usual in (("aggregation", "mean"), ("leave_out_nonfinite", False), ("batch_shares", "even")):
                if getattr(self, name) != usual:
                    raise ValueError(f"parallel.{name} is for several processes, and mode=dataparallel is one")
        elif self.output_device is not None:
            raise ValueError("output_device is for mode=dataparallel")
        if (self.aggregation == "weighted") != (self.aggregation_weights is not None):
            raise ValueError("aggregation=weighted and aggregation_weights go together")
        if self.stages_per_process > 1 and (self.pipeline or 1) == 1 and self.mode is not MultiGPUMode.HYBRID:
            raise ValueError("stages_per_process > 1 needs parallel.pipeline > 1")
        return self
