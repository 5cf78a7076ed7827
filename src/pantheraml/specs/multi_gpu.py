"""MultiGPUConfig: processes, devices and parallelism (section `parallel` of a TrainConfig).

The field docstrings are the user documentation: docs/configuration.md is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, PydanticCustomError

from pantheraml.specs.aggregation import Method
from pantheraml.specs.legacy_aliases import translate_aliases
from pantheraml.specs.parallel import DIMENSIONS, Degree
from pantheraml.specs.section_errors import explained
from pantheraml.specs.unknown_field import fields_hint


def split_commas(value: object) -> object:
    """Split `2,2,2,15`, a list as written on the command line, where a list of one is a number."""
    if isinstance(value, str) and "," in value:
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


class MultiGPUMode(StrEnum):
    """Values of `parallel.mode` in YAML, flags and REST."""

    NONE = "none"
    DATAPARALLEL = "dataparallel"
    DISTRIBUTED = "distributed"
    HYBRID = "hybrid"
    AUTO = "auto"


@dataclass(config=ConfigDict(extra="forbid", use_attribute_docstrings=True), kw_only=True)
class MultiGPUConfig:
    """Processes, devices and parallelism, for runs and for your own loops."""

    mode: MultiGPUMode = MultiGPUMode.AUTO
    """none: one process; dataparallel: one process that replicates the model on its GPUs per batch (simple, slow);
    distributed: one process per device, DDP unless parallel degrees are set; hybrid: DDP combined with
    hybrid_strategy; auto: distributed if there is more than one device, with degrees that fit into its memory (see
    planner.md)."""
    auto_policy: Literal["distributed", "simple"] = "distributed"
    """Meaning of mode=auto. distributed: one process per GPU; simple: dataparallel up to 4 GPUs, then distributed."""
    world_size: Annotated[int, Field(ge=1)] | None = None
    """Number of processes; None = one per visible GPU, or one process without GPUs."""
    rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of this process if you start each process yourself; set world_size and local_rank, too, and the environment
    variables MASTER_ADDR and MASTER_PORT. None = set by the launcher."""
    local_rank: Annotated[int, Field(ge=0)] | None = None
    """Rank of this process on its node, which selects its GPU; set together with rank."""
    device_ids: Annotated[list[Annotated[int, Field(ge=0)]] | None, BeforeValidator(split_commas)] = None
    """GPU indices to use, as shown by `pantheraml gpus`; None = all visible GPUs that are healthy and free."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each GPU's memory that a process of the run may use, enforced by torch; an automatic choice passes over
    GPUs with less free memory. None = all, and GPUs of which half is free."""
    output_device: Annotated[int, Field(ge=0)] | None = None
    """mode=dataparallel: GPU that gathers losses and gradients and holds the weights and optimizer states; None = the
    first."""
    replicate: Degree | None = None
    """DDP degree: replicas of the model, each with different samples (with `shard`: HSDP); None = the remaining
    processes."""
    shard: Degree | None = None
    """FSDP2 degree: ranks that share the weights, gradients and optimizer states, each with different samples."""
    tensor: Degree | None = None
    """Tensor parallel degree: ranks that share each weight matrix."""
    pipeline: Degree | None = None
    """Pipeline parallel degree: ranks that hold successive stages of layers."""
    context: Degree | None = None
    """Context parallel degree: ranks that share each sequence."""
    auto_device_map: Annotated[bool, Field(exclude=True)] = False
    """Alias of model.device_map=auto: one process splits the layers over its GPUs."""
    use_gradient_checkpointing: Annotated[bool | Literal["unsloth"] | None, Field(exclude=True)] = None
    """Alias of train.activation_checkpointing: true = full, unsloth = offload, false = none; None = not set."""
    enable_hybrid: Annotated[bool, Field(exclude=True)] = False
    """The same as mode=hybrid; set by either."""
    hybrid_strategy: Literal["pipeline", "model_parallel", "data_parallel"] = "pipeline"
    """mode=hybrid: combine DDP with pipeline parallel, tensor parallel (model_parallel) or FSDP2 (data_parallel)."""
    stages_per_process: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages per process. 1: 1F1B schedule; more: interleaved schedule, with a smaller bubble."""
    backend: Literal["nccl", "gloo"] = "nccl"
    """Communication backend for GPUs; CPU runs always use gloo."""
    aggregation: Method = "mean"
    """How gradients of the replicas are combined. mean: over all tokens, equal to one GPU; weighted: by
    aggregation_weights; median, trimmed_mean: robust against a few bad ranks, but not equal to one GPU."""
    aggregation_weights: Annotated[list[Annotated[float, Field(ge=0)]] | None, BeforeValidator(split_commas)] = None
    """aggregation=weighted: one weight per replica."""
    leave_out_nonfinite: bool = False
    """Exclude a rank with a non-finite gradient from the step, instead of treating the whole step as bad."""
    batch_shares: Annotated[
        Literal["even", "adaptive"] | list[Annotated[int, Field(ge=0)]], BeforeValidator(split_commas)
    ] = "even"
    """Split of the global batch over the replicas. even; adaptive: slower ranks get fewer sequences; or the sequences
    of each, such as 2,2,2,15, with train.global_batch_size as their sum."""
    check_every: Annotated[int, Field(ge=0)] = 100
    """Steps between checks that all replicas hold the same weights and gradients; drift stops the run. 0 = never."""
    find_unused_parameters: bool = False
    """DDP: search for parameters without a gradient in each step (slower); needed only if some are unused."""
    gradient_as_bucket_view: bool = True
    """DDP: let gradients share memory with the communication buckets."""
    broadcast_buffers: bool = True
    """DDP: broadcast rank 0's buffers before each forward."""
    static_graph: bool = True
    """DDP: allow static_graph; used where reentrant checkpointing needs it."""
    enable_gradient_synchronization: Annotated[bool, Field(exclude=True)] = True
    """Always true: processes that do not share gradients train different models, so false is rejected."""
    sync_bn: bool = True
    """Synchronize batch norm, if the model has any, over all ranks of a GPU run."""
    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """DDP: size of a communication bucket in MiB."""
    enable_multi_gpu_monitoring: bool = True
    """Emit `train.ranks` events with tokens, seconds and memory of every rank, which the report plots to show slow or
    full ranks."""
    timeout_seconds: Annotated[int, Field(ge=1)] = 300
    """Seconds that a rank waits for its peers before the run stops with an error."""
    max_retries: Annotated[int, Field(ge=0)] = 3
    """Retries of a failed rendezvous; also consecutive restarts by `pantheraml train` from the last checkpoint for the
    reasons in restart_on."""
    enable_fault_tolerance: Annotated[bool, Field(exclude=True)] = True
    """false: the same as max_retries=0; set by either."""
    restart_on: Annotated[tuple[Literal["killed", "failed", "hung"], ...], BeforeValidator(split_commas)] = ("killed",)
    """Failures after which `pantheraml train` restarts the processes. killed: a process was killed; failed: unexpected
    exception; hung: no progress for timeout_seconds."""
    min_world_size: Annotated[int, Field(ge=1)] | None = None
    """After max_retries failed restarts, continue with fewer processes, at least this many, and the same global batch;
    None = stop."""
    strict: bool = False
    """Stop if a rank cannot use its device, instead of continuing on one device with a warning."""
    grace_seconds: Annotated[int, Field(ge=1)] = 120
    """Seconds for workers to save after Ctrl-C, SIGTERM or SIGUSR1 before they are killed."""

    @model_validator(mode="before")
    @classmethod
    def _translate_legacy_aliases(cls, given: object) -> object:
        if isinstance(given, dict):
            given = dict(given)  # the caller's own stays as it is
        values = given.kwargs if isinstance(given, ArgsKwargs) else given
        if isinstance(values, dict):
            translate_aliases(values)
        if isinstance(given, ArgsKwargs):  # not a section of a file, whose reader knows all keys
            cls._refuse_unknown(given.kwargs or {})
        return given

    @classmethod
    def _refuse_unknown(cls, values: Mapping[str, object]) -> None:
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise PydanticCustomError(
                "unknown_field",
                "there is no field {names}.\n  fix: {hint}",
                {"names": ", ".join(f"`{name}`" for name in unknown), "hint": fields_hint(unknown, known)},
            )

    @model_validator(mode="after")
    def _check_consistency(self) -> MultiGPUConfig:
        if (self.rank is None) != (self.local_rank is None) or (self.rank is not None and self.world_size is None):
            raise ValueError("parallel.rank, local_rank and world_size must be set together")
        if self.rank is not None and self.world_size is not None and self.rank >= self.world_size:
            raise ValueError(f"parallel.rank={self.rank} is not a rank of parallel.world_size={self.world_size}")
        degrees = [name for name in DIMENSIONS if getattr(self, name) is not None]
        if degrees and self.mode in (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL, MultiGPUMode.HYBRID):
            raise ValueError(
                f"parallel.{degrees[0]} is for mode=distributed or auto; mode={self.mode} chooses its own degrees"
            )
        if self.mode is MultiGPUMode.DATAPARALLEL:
            for name, default in (("aggregation", "mean"), ("leave_out_nonfinite", False), ("batch_shares", "even")):
                if getattr(self, name) != default:
                    raise ValueError(f"parallel.{name} needs several processes, but mode=dataparallel runs one")
        elif self.output_device is not None:
            raise ValueError("output_device is for mode=dataparallel")
        if (self.aggregation == "weighted") != (self.aggregation_weights is not None):
            raise ValueError("aggregation=weighted and aggregation_weights must be set together")
        if self.stages_per_process > 1 and (self.pipeline or 1) == 1 and self.mode is not MultiGPUMode.HYBRID:
            raise ValueError("stages_per_process > 1 needs parallel.pipeline > 1")
        return self

    @model_validator(mode="wrap")  # the last one, so that it sees errors of those above
    @classmethod
    def _explain(cls, given: object, handler: ModelWrapValidatorHandler[MultiGPUConfig]) -> MultiGPUConfig:
        try:
            return handler(given)
        except ValidationError as err:
            if not isinstance(given, ArgsKwargs):  # a section of a file, whose reader explains it
                raise
            raise explained(err, cls) from None
