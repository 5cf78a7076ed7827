"""From the mode and the degrees that the user named to ParallelDims for a number of processes, with the reason."""

from __future__ import annotations

import math

from pantheraml.base.errors import ConfigError
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.parallel import DIMENSIONS, ParallelDims
from pantheraml.specs.train import TrainConfig

_BESIDE_COPIES = {"pipeline": "pipeline", "model_parallel": "tensor", "data_parallel": "shard"}
"""hybrid_strategy -> the dimension that it adds."""


def choose_dims(parallel: MultiGPUConfig, world_size: int) -> tuple[ParallelDims, str]:
    """How `world_size` processes divide the work, and why."""
    if parallel.mode is MultiGPUMode.HYBRID:
        return _hybrid(parallel, world_size)
    asked = {name: degree for name in DIMENSIONS if (degree := getattr(parallel, name)) is not None}
    if not asked:
        if world_size == 1:
            return ParallelDims(), "there is one process"
        return ParallelDims(replicate=world_size), "every process holds the whole model and sees other samples (DDP)"
    rest = math.prod(degree for name, degree in asked.items() if name != "replicate")
    if "replicate" not in asked and world_size % rest == 0:
        asked["replicate"] = world_size // rest
    dims = ParallelDims(**asked)
    dims.check(world_size)
    return dims, "as the degrees under `parallel` say"


def check_together(config: TrainConfig, dims: ParallelDims) -> None:
    """ConfigError for what does not go together with that way to divide the work; nothing has been loaded yet."""
    _check_product(dims)
    parallel = config.parallel
    plain = dims.world_size == dims.replicate
    if not plain:
        for name, usual in (("aggregation", "mean"), ("leave_out_nonfinite", False)):
            if getattr(parallel, name) != usual:
                raise ConfigError(
                    f"parallel.{name}={getattr(parallel, name)} is for copies of whole models, not for {dims}.",
                    todo="Leave it out, or use parallel.replicate alone.",
                )
    if parallel.batch_shares == "adaptive" and not plain:
        raise ConfigError(
            f"parallel.batch_shares=adaptive is for copies of whole models, not for {dims}.",
            todo="Use batch_shares=even or sizes by hand.",
        )
    _check_shares(parallel.batch_shares, config.train.global_batch_size, dims)
    if config.data.packing and config.data.seq_len % dims.context:
        raise ConfigError(
            f"Packed rows of {config.data.seq_len} tokens cannot be cut into {dims.context} equal parts.",
            todo="Make data.seq_len a multiple of parallel.context.",
        )
    if config.train.optimizer == "adamw8bit" and max(dims.shard, dims.tensor) > 1:
        raise ConfigError(
            f"train.optimizer=adamw8bit packs whole tensors in blocks, and they are divided ({dims}).",
            todo="Use train.optimizer=adamw or adamw_bf16.",
        )
    if config.method.kind == "full" and config.model.precision == "fp8" and dims.tensor > 1:
        raise ConfigError(
            f"In a full fine-tune with model.precision=fp8, each process would round its own part of a row ({dims}).",
            todo="Use model.precision=bf16, or divide the work by parallel.shard or parallel.pipeline.",
        )


def _check_shares(shares: str | list[int], batch: int, dims: ParallelDims) -> None:
    if not isinstance(shares, list):
        return
    written = ",".join(map(str, shares))
    if len(shares) != dims.data or min(shares) < 1:
        raise ConfigError(
            f"parallel.batch_shares={written} is not a size of at least 1 for each of the {dims.data} shares of a"
            " batch.",
            todo=f"Write {dims.data} number(s), such as {','.join(map(str, _even(batch, dims.data)))}.",
        )
    if sum(shares) != batch:
        raise ConfigError(
            f"parallel.batch_shares={written} adds up to {sum(shares)} sequences, but train.global_batch_size is"
            f" {batch}.",
            todo=f"Set train.global_batch_size={sum(shares)}, or shares that add up to {batch}.",
        )


def _even(batch: int, shares: int) -> list[int]:
    return [batch // shares + (rank < batch % shares) for rank in range(shares)]


def _check_product(dims: ParallelDims) -> None:
    if dims.pipeline > 1 and max(dims.shard, dims.tensor, dims.context) > 1:
        raise ConfigError(
            f"A pipeline goes together with copies of the model (replicate), not with {dims}.",
            todo="Use parallel.pipeline and parallel.replicate, or leave the pipeline out.",
        )
    if dims.replicate > 1 and dims.shard > 1 and dims.context > 1:
        raise ConfigError(
            f"Copies of sharded weights do not go together with cut sequences ({dims}).",
            todo="Use parallel.shard and parallel.context without parallel.replicate.",
        )


def named_modes(world_size: int) -> dict[str, ParallelDims]:
    """The ways to use all of `world_size` processes, by the names people have for them."""
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
    name = _BESIDE_COPIES[parallel.hybrid_strategy]
    if world_size < 2:
        raise ConfigError(
            f"parallel.mode=hybrid divides the model over several processes, but there is {world_size}.",
            todo="Use more GPUs (or --nproc on CPUs), or another parallel.mode.",
        )
    beside = 2 if world_size % 2 == 0 else world_size
    dims = ParallelDims(**{name: beside, "replicate": world_size // beside})
    copies = f"{dims.replicate} copies of the model" if dims.replicate > 1 else "one copy of the model"
    return dims, f"hybrid_strategy={parallel.hybrid_strategy}: {copies}, each over {beside} processes"
