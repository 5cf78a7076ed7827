"""Data parallelism: which rank gets which samples, and the DDP wrapper that sums their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pantheraml.parallel.process_group import World
from pantheraml.specs.multi_gpu import MultiGPUConfig

Ids = npt.NDArray[np.int64]


def shard(ids: Ids, *, rank: int, size: int, micro_batch: int) -> list[Ids]:
    """This rank's micro-batches of a global batch: contiguous shares that differ by at most one sample.

    A rank may get none (a short last batch); the caller still has to take part in the gradient exchange.
    """
    share = np.array_split(ids, size)[rank]
    return [share[start : start + micro_batch] for start in range(0, len(share), micro_batch)]


def wrap(model: nn.Module, world: World, config: MultiGPUConfig, *, constant_buffers: Sequence[str] = ()) -> nn.Module:
    """`model` under DDP, or as it is in a run of one process.

    `constant_buffers` are names of buffers that no step changes and all ranks hold alike, such as packed weights: DDP
    would send them before every forward pass.
    """
    if world.size == 1:
        return model
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(constant_buffers))
    # torch 2.13 deprecates the name broadcast_buffers; it is passed only by those who turn it off
    buffers: dict[str, Any] = {} if config.broadcast_buffers else {"broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        bucket_cap_mb=config.bucket_cap_mb,
        **buffers,
    )


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside keep their gradients local: for all micro-batches of a step but the last."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def gradient_scale(world: World, target_tokens: int) -> float:
    """Factor on a rank's summed token loss so that DDP's *mean* over ranks is the global token mean."""
    return world.size / max(1, target_tokens)
