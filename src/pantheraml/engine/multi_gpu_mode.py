"""Which multi-GPU mode a custom training loop gets, and why: pure functions, with errors for what cannot be done."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pantheraml.base.errors import ConfigError, DeviceError, LaunchError
from pantheraml.engine.memory.usage import free_bytes
from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.quantized_linear import constant_buffers
from pantheraml.parallel.device_map import FOR_WEIGHTS, is_split
from pantheraml.planner.processes import SIMPLE_LIMIT
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode


def relaunch_count(config: MultiGPUConfig, gpus: int, requested: int | None = None) -> int | None:
    """Return the number of ranks that a lone process should be relaunched as; None: it should stay alone.

    `requested`: PANTHERAML_NPROC. It counts where there are no GPUs, too, as `world_size` does.
    """
    if config.mode is MultiGPUMode.DISTRIBUTED or (config.mode is MultiGPUMode.HYBRID and _shards(config)):
        wanted = True
    else:
        simple = config.auto_policy == "simple" and gpus <= SIMPLE_LIMIT
        wanted = config.mode is MultiGPUMode.AUTO and not simple
    count = next(number for number in (config.world_size, requested, gpus) if number is not None)
    return count if wanted and config.rank is None and count > 1 else None


def choose_mode(
    config: MultiGPUConfig, *, world_size: int, launched: int, gpus: int, why_no_replicas: str | None = None
) -> tuple[MultiGPUMode, str]:
    """Resolve the mode of `config` and give the reason.

    `launched`: number of processes that were launched; `world_size`: size of the process group; `gpus`: of this
    process; `why_no_replicas`: why DataParallel cannot be used for the model.
    """
    requested = config.mode
    if requested is MultiGPUMode.NONE:
        return requested, "multi-GPU is disabled"
    if requested is MultiGPUMode.DATAPARALLEL:
        return requested, _data_parallel(max(world_size, launched), gpus, why_no_replicas)
    check_process_group(world_size=world_size, launched=launched)
    if config.world_size not in (None, world_size) and (world_size > 1 or requested is not MultiGPUMode.AUTO):
        raise LaunchError(
            f"world_size={config.world_size} is set, but the process group has {world_size} rank(s).",
            fix="Start that many processes, or remove world_size.",
        )
    if requested is MultiGPUMode.HYBRID:
        return requested, _hybrid(config, world_size, gpus)
    if world_size > 1:
        return MultiGPUMode.DISTRIBUTED, f"the process group has {world_size} ranks"
    if requested is MultiGPUMode.DISTRIBUTED:
        raise LaunchError(
            "distributed needs several processes, but there is only one.",
            fix="Launch the script with torchrun, or call pantheraml.enable_multi_gpu() first.",
        )
    if gpus < 2:
        return MultiGPUMode.NONE, "there is one device"
    simple = config.auto_policy == "simple"
    if simple and gpus > SIMPLE_LIMIT:
        return MultiGPUMode.NONE, f"auto_policy=simple wants one process per GPU for {gpus} GPUs; use torchrun"
    if why_no_replicas is not None:
        return MultiGPUMode.NONE, f"one process uses one of {gpus} GPUs, without replicas: {why_no_replicas}"
    reason = f"auto_policy=simple with {gpus} GPUs" if simple else "this process cannot be relaunched as one per GPU"
    return MultiGPUMode.DATAPARALLEL, f"{reason}; torchrun would be faster"


def _data_parallel(processes: int, gpus: int, why_not: str | None) -> str:
    if processes > 1:
        raise ConfigError(
            f"dataparallel is for one process with several GPUs, but there are {processes} processes.",
            fix="Use the mode distributed or auto.",
        )
    if gpus < 2:
        raise DeviceError(
            f"dataparallel needs at least two GPUs, but there are {gpus}.", fix="Use the mode none or auto."
        )
    if why_not is not None:
        raise ConfigError(f"dataparallel cannot be used: {why_not}.", fix="Launch the script with torchrun.")
    return f"requested, with {gpus} GPUs"


def _hybrid(config: MultiGPUConfig, world_size: int, gpus: int) -> str:
    strategy = config.hybrid_strategy
    if _shards(config):
        if world_size < 2:
            raise LaunchError(
                "hybrid with hybrid_strategy=data_parallel shards the model over several processes, but there is one.",
                fix="Launch the script with torchrun.",
            )
        return f"FSDP over {world_size} ranks"
    if gpus < 2:
        raise DeviceError(
            f"hybrid with hybrid_strategy={strategy} needs at least two GPUs per process, but this one has {gpus}.",
            fix="Use the mode auto or distributed; for language models, `pantheraml train` can give each process one"
            " pipeline stage.",
        )
    over = f", DDP over {world_size} ranks" if world_size > 1 else ""
    return f"layers on {gpus} GPUs of the process{over}"


def _shards(config: MultiGPUConfig) -> bool:
    return config.hybrid_strategy == "data_parallel"


def why_no_replicas(model: nn.Module, gpu: int | None) -> str | None:
    """Return why `nn.DataParallel` cannot replicate `model`, with `gpu` as its first device; None: it can."""
    if getattr(model, "is_quantized", False) or any(True for _ in constant_buffers(model)):
        return "the model is quantized"
    if any(is_fused(module) for module in model.modules()):
        return "the model has fused layers, whose replicas would use the weights of the first GPU"
    if is_split(model):
        return "the model's layers are on several devices"
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if gpu is not None and size > FOR_WEIGHTS * (room := free_bytes(torch.device("cuda", gpu))):
        return f"its {size:,} bytes of weights do not fit on GPU {gpu}, which has {room:,} free"
    return None


def check_device(device: torch.device, gpus: Sequence[int], *, backend: str, requested: str) -> None:
    """Raise unless DDP over `backend` works for a replica on `device`."""
    if device.type == "cpu":
        if backend == "nccl":
            raise DeviceError("The process group uses nccl, but the model is on the CPU.", fix="Move it to a GPU.")
        return
    if device.index not in gpus:
        raise DeviceError(
            f"The model is on {device}, which is not among the GPUs to use: {', '.join(map(str, gpus))}.",
            fix="Move it to one of them, or change multi_gpu_device_ids.",
        )
    if backend != requested:
        raise ConfigError(
            f"The process group uses {backend}, but {requested} was requested.",
            fix=f"Call init_process_group('{requested}'), or set multi_gpu_backend='{backend}'.",
        )


def check_process_group(*, world_size: int, launched: int) -> None:
    """Raise if several processes were launched but have no process group."""
    if launched > 1 and world_size == 1:
        raise LaunchError(
            f"{launched} processes were launched, but there is no process group: each would train its own model.",
            fix="Call torch.distributed.init_process_group() first, or set enable_multi_gpu=False.",
        )


def gpus_of_process(gpus: Sequence[int], local_rank: int, local_world_size: int) -> list[int]:
    """Return this process's part of the node's GPUs."""
    each = len(gpus) // local_world_size
    return list(gpus[local_rank * each : (local_rank + 1) * each])
