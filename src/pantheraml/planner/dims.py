"""Choose ParallelDims from the configured mode, the parallel degrees and the world size, with the reason."""

from __future__ import annotations

import math

from pantheraml.base.errors import ConfigError
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.parallel import DIMENSIONS, ParallelDims
from pantheraml.specs.train import TrainConfig

_HYBRID_DIMENSION = {"pipeline": "pipeline", "model_parallel": "tensor", "data_parallel": "shard"}
"""hybrid_strategy -> the dimension combined with `replicate`."""


def choose_dims(parallel: MultiGPUConfig, world_size: int) -> tuple[ParallelDims, str]:
    """Return the parallel degrees for `world_size` processes, and the reason."""
    if parallel.mode is MultiGPUMode.HYBRID:
        return _hybrid(parallel, world_size)
    degrees = {name: degree for name in DIMENSIONS if (degree := getattr(parallel, name)) is not None}
    if not degrees:
        if world_size == 1:
            return ParallelDims(), "there is one process"
        return ParallelDims(replicate=world_size), "DDP: every process holds the whole model and sees different samples"
    rest = math.prod(degree for name, degree in degrees.items() if name != "replicate")
    if "replicate" not in degrees and world_size % rest == 0:
        degrees["replicate"] = world_size // rest
    dims = ParallelDims(**degrees)
    dims.check(world_size)
    return dims, "set by the degrees in `parallel`"


def check_together(config: TrainConfig, dims: ParallelDims) -> None:
    """ConfigError for settings that the parallel degrees do not support; checked before anything is loaded."""
    _check_combination(dims)
    parallel = config.parallel
    ddp_only = dims.world_size == dims.replicate
    if not ddp_only:
        for name, default in (("aggregation", "mean"), ("leave_out_nonfinite", False)):
            if getattr(parallel, name) != default:
                raise ConfigError(
                    f"parallel.{name}={getattr(parallel, name)} works only with DDP, not with {dims}.",
                    fix=f"Remove parallel.{name}, or use parallel.replicate alone.",
                )
    if parallel.batch_shares == "adaptive" and not ddp_only:
        raise ConfigError(
            f"parallel.batch_shares=adaptive works only with DDP, not with {dims}.",
            fix="Use batch_shares=even, or list the sizes.",
        )
    _check_shares(parallel.batch_shares, config.train.global_batch_size, dims)
    if config.data.packing and config.data.seq_len % dims.context:
        raise ConfigError(
            f"Packed sequences of {config.data.seq_len} tokens cannot be split into {dims.context} equal parts.",
            fix="Make data.seq_len a multiple of parallel.context.",
        )
    if config.train.optimizer == "adamw8bit" and max(dims.shard, dims.tensor) > 1:
        raise ConfigError(
            f"train.optimizer=adamw8bit quantizes whole tensors in blocks, but they are sharded ({dims}).",
            fix="Use train.optimizer=adamw or adamw_bf16.",
        )
    if config.method.kind == "full" and config.model.precision == "fp8" and dims.tensor > 1:
        raise ConfigError(
            "A full fine-tune with model.precision=fp8 does not support tensor parallelism: each rank would round its"
            f" own part of a row ({dims}).",
            fix="Use model.precision=bf16, or parallel.shard or parallel.pipeline instead of parallel.tensor.",
        )


def _check_shares(shares: str | list[int], batch: int, dims: ParallelDims) -> None:
    if not isinstance(shares, list):
        return
    value = ",".join(map(str, shares))
    if len(shares) != dims.data or min(shares) < 1:
        raise ConfigError(
            f"parallel.batch_shares={value} must list a size of at least 1 for each of the {dims.data} data parallel"
            " rank(s).",
            fix=f"List {dims.data} number(s), such as {','.join(map(str, _even(batch, dims.data)))}.",
        )
    if sum(shares) != batch:
        raise ConfigError(
            f"parallel.batch_shares={value} adds up to {sum(shares)} sequences, but train.global_batch_size is"
            f" {batch}.",
            fix=f"Set train.global_batch_size={sum(shares)}, or shares that add up to {batch}.",
        )


def _even(batch: int, shares: int) -> list[int]:
    return [batch // shares + (rank < batch % shares) for rank in range(shares)]


def _check_combination(dims: ParallelDims) -> None:
    if dims.pipeline > 1 and max(dims.shard, dims.tensor, dims.context) > 1:
        raise ConfigError(
            f"Pipeline parallelism can be combined only with parallel.replicate, not as {dims}.",
            fix="Use parallel.pipeline with parallel.replicate, or without pipeline parallelism.",
        )
    if dims.replicate > 1 and dims.shard > 1 and dims.context > 1:
        raise ConfigError(
            f"HSDP cannot be combined with context parallelism ({dims}).",
            fix="Use parallel.shard and parallel.context without parallel.replicate.",
        )


def named_modes(world_size: int) -> dict[str, ParallelDims]:
    """Map the usual names of parallel modes to degrees that use all `world_size` processes."""
    n = world_size
    modes = {
        "ddp": ParallelDims(replicate=n),
        "fsdp": ParallelDims(shard=n),
        "tp": ParallelDims(tensor=n),
        "pp": ParallelDims(pipeline=n),
        "cp": ParallelDims(context=n),
    }
    if n > 2 and n % 2 == 0:
        half = n // 2
        modes |= {
            "hsdp": ParallelDims(replicate=2, shard=half),
            "ddp+tp": ParallelDims(replicate=half, tensor=2),
            "fsdp+tp": ParallelDims(shard=half, tensor=2),
            "ddp+pp": ParallelDims(replicate=half, pipeline=2),
            "ddp+cp": ParallelDims(replicate=half, context=2),
            "fsdp+cp": ParallelDims(shard=half, context=2),
        }
    return modes


def _hybrid(parallel: MultiGPUConfig, world_size: int) -> tuple[ParallelDims, str]:
    name = _HYBRID_DIMENSION[parallel.hybrid_strategy]
    if world_size < 2:
        raise ConfigError(
            f"parallel.mode=hybrid needs several processes, but there is {world_size}.",
            fix="Use more GPUs (or --nproc on CPUs), or another parallel.mode.",
        )
    degree = 2 if world_size % 2 == 0 else world_size
    dims = ParallelDims(**{name: degree, "replicate": world_size // degree})
    replicas = f"{dims.replicate} replicas of the model" if dims.replicate > 1 else "one replica of the model"
    return dims, f"hybrid_strategy={parallel.hybrid_strategy}: {replicas}, each over {degree} processes"
