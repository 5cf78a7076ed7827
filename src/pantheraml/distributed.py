"""Ranks, communication and memory for your own distributed code, in one process as well as in many.

    setup()                          # joins the ranks that torchrun, accelerate, Slurm or a relaunch started
    mean_loss = all_reduce(loss, "mean")
    names = broadcast(names)         # from rank 0
    barrier()
    cleanup()

Every function also works in a single process, where there is nothing to wait for. `barrier`, `broadcast` and
`all_reduce` are collectives: all ranks must call them.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.engine.memory.usage import MIB, MemoryManager
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper
from pantheraml.multigpu import disable_multi_gpu, enable_multi_gpu, get_multi_gpu_config
from pantheraml.parallel.device_map import DeviceMap, MaxMemory, memory_for_weights, place
from pantheraml.parallel.json_gather import broadcast_json
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.performance import PerformanceConfig

__all__ = [
    "MultiGPUConfig",
    "all_reduce",
    "barrier",
    "broadcast",
    "cleanup",
    "clear_gpu_cache",
    "disable_multi_gpu",
    "enable_multi_gpu",
    "get_device_map",
    "get_gpu_memory_info",
    "get_local_rank",
    "get_multi_gpu_config",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "set_gpu_device",
    "setup",
]

Reduction = Literal["mean", "sum", "min", "max"]
_OPERATIONS: Mapping[str, dist.ReduceOp.RedOpType] = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class _Joined:
    """The group that `setup` joined."""

    wrapper: MultiGPUWrapper | None = None


def setup(config: MultiGPUConfig | None = None) -> int:
    """Join the ranks, or relaunch a script that is alone on several GPUs as one rank per GPU; return the world size.

    A group that exists already is used as it is. May be called again. A rank that does not join raises LaunchError
    within `config.timeout_seconds`.
    """
    log.start_for_scripts()
    if not dist.is_initialized():
        wrapper = MultiGPUWrapper(PerformanceConfig(multi_gpu_config=config or MultiGPUConfig()))
        wrapper.setup()
        cleanup()
        _Joined.wrapper = wrapper
        atexit.register(cleanup)
    return get_world_size()


def cleanup() -> None:
    """Leave the group that `setup` joined; one that you initialized stays. May be called again."""
    atexit.unregister(cleanup)
    if _Joined.wrapper is not None:
        _Joined.wrapper.close()
        _Joined.wrapper = None


def is_distributed() -> bool:
    """Return whether this process is one of several ranks, joined already or not."""
    return get_world_size() > 1


def get_rank() -> int:
    """Return the rank in the group, or before `setup` that of the launcher; 0 in a single process."""
    return dist.get_rank() if dist.is_initialized() else env.process_rank().rank


def get_local_rank() -> int:
    """Return the rank on this node, which is the index of this process's GPU."""
    return env.process_rank().local_rank


def get_world_size() -> int:
    """Return the number of ranks; 1 in a single process."""
    return dist.get_world_size() if dist.is_initialized() else env.process_rank().world_size


def is_main_process() -> bool:
    """Return whether this is rank 0, which prints and saves."""
    return get_rank() == 0


def barrier() -> None:
    """Wait for all ranks."""
    if _needs_group("barrier"):
        dist.barrier()


def broadcast(value: Any, src: int = 0) -> Any:
    """Return rank `src`'s `value` on every rank: numbers, text, lists and dicts of them, as JSON carries them.

    Nothing that a peer sends is unpickled. For tensors, use `torch.distributed.broadcast`.
    """
    if not 0 <= src < get_world_size():
        raise ConfigError(
            f"src={src} is not a rank of {get_world_size()} process(es).",
            fix=f"Use a rank from 0 to {get_world_size() - 1}.",
        )
    sent: Any = {"value": value} if get_rank() == src else None
    try:
        json.dumps(sent)
    except (TypeError, ValueError) as err:
        sent = {"problem": str(err)}  # sent, too: the others wait for it
    received = broadcast_json(sent, src) if _needs_group("broadcast") else sent
    if "problem" in received:
        raise ConfigError(
            f"The value of rank {src} cannot be broadcast: {received['problem']}.",
            fix="Pass numbers, text, lists and dicts; use torch.distributed.broadcast for tensors.",
        )
    return received["value"]


def all_reduce(value: float | torch.Tensor, op: Reduction = "mean") -> float:
    """Return the mean, sum, minimum or maximum of `value`, a number or a tensor of one, over all ranks."""
    if op not in _OPERATIONS:
        raise ConfigError(f"op={op!r} is not a reduction.", fix=f"Use one of {', '.join(_OPERATIONS)}.")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ConfigError(
            f"all_reduce is for one number, but the tensor has {value.numel()}.",
            fix="Use torch.distributed.all_reduce for tensors.",
        )
    number = value.item() if isinstance(value, torch.Tensor) else float(value)
    if not _needs_group("all_reduce"):
        return number
    total = torch.tensor(number, dtype=torch.float64, device=_device())
    dist.all_reduce(total, _OPERATIONS[op])
    return total.item() / (dist.get_world_size() if op == "mean" else 1)


def get_device_map(
    model: nn.Module, device_map: DeviceMap = "auto", max_memory: MaxMemory | None = None
) -> dict[str, int | str]:
    """Return module -> device for `model` on the GPUs of this process, or on the host without any; nothing is moved.

    `device_map`: auto, balanced or sequential, a device, or a mapping. `max_memory` limits the weights on each device.
    """
    return dict(place(model, device_map, memory_for_weights(), max_memory))


def get_gpu_memory_info() -> list[dict[str, Any]]:
    """Return index, name and memory in MiB of each visible GPU: used by torch in this process, free and total."""
    used = MemoryManager().get_memory_usage()["gpus"]
    for gpu in used:
        free, total = torch.cuda.mem_get_info(gpu["device"])
        gpu |= {"name": torch.cuda.get_device_name(gpu["device"]), "free_mb": free / MIB, "total_mb": total / MIB}
    return list(used)


def clear_gpu_cache() -> float:
    """Return memory that torch has cached to the driver; the result says how many MiB."""
    return float(MemoryManager().optimize_memory(force=True)["freed_gpu_mb"])


def set_gpu_device(index: int | None = None) -> torch.device:
    """Make GPU `index` the current device, by default that of this rank; the CPU if there is no GPU."""
    gpus = torch.cuda.device_count()
    if index is None and not gpus:
        return torch.device("cpu")
    chosen = get_local_rank() if index is None else index
    if not 0 <= chosen < gpus:
        raise DeviceError(f"GPU {chosen} was requested, but {gpus} GPU(s) are visible.", fix="See `pantheraml gpus`.")
    torch.cuda.set_device(chosen)
    return torch.device("cuda", chosen)


def _needs_group(name: str) -> bool:
    """Return whether a collective has anybody to talk to; raise if ranks were started but have not joined."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    if env.process_rank().world_size > 1:
        raise ConfigError(
            f"{name} was called on one of {env.process_rank().world_size} ranks that have not joined each other.",
            fix="Call pantheraml.distributed.setup() first.",
        )
    return False


def _device() -> torch.device:
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
