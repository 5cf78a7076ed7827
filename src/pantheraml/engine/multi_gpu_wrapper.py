"""Multi-GPU wrapper for custom training loops: wraps the model and reports the state of the devices.

The user launches the processes (`torchrun`, `pantheraml.enable_multi_gpu`) and calls
`torch.distributed.init_process_group`. A requested mode that is unavailable is an error; there is no silent fallback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, DeviceError, LaunchError
from pantheraml.devices.sampler import GPUSampler, GPUSnapshot
from pantheraml.engine.guard.own_loop import trained_parameters
from pantheraml.engine.parallelize import Traits, with_ddp
from pantheraml.parallel.device_map import is_split
from pantheraml.parallel.process_group import World, world_from_process_group
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode

logger = log.get(__name__)

MIB = 2**20


class MultiGPUWrapper:
    def __init__(self, config: MultiGPUConfig) -> None:
        self._config, self._sampler = config, GPUSampler()
        self._mode, self._reason = MultiGPUMode.NONE, "no model was wrapped yet"
        self._devices: list[torch.device] = []
        """Devices of the wrapped model in this process."""

    @property
    def _gpus(self) -> list[int]:
        """Indices of the GPUs to use."""
        visible = list(range(torch.cuda.device_count()))
        requested = self._config.device_ids
        missing = [index for index in requested or () if index not in visible]
        if missing:
            raise DeviceError(
                f"GPU {missing[0]} was requested, but {len(visible)} GPU(s) are visible.", fix="See `pantheraml gpus`."
            )
        return visible if requested is None else list(requested)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` in DDP or DataParallel, or return it as it is. A collective if there are several processes."""
        gpus = self._gpus
        mode, reason = choose_mode(
            self._config.mode, world_size=_world_size(), launched=env.process_rank().world_size, gpus=len(gpus)
        )
        logger.info("multi-GPU mode %s: %s", mode, reason)
        wrapped = model
        if mode is MultiGPUMode.DATAPARALLEL:
            wrapped = DataParallel(model.to(torch.device("cuda", gpus[0])), device_ids=gpus)
            self._devices = [torch.device("cuda", index) for index in gpus]
        else:
            self._devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
            if mode is MultiGPUMode.DISTRIBUTED:
                wrapped = self._with_ddp(model, gpus)
        self._mode, self._reason = mode, reason
        return wrapped

    def peers(self, model: nn.Module) -> World:
        """World of the ranks that train `model` together; size 1 if multi-GPU is disabled. A collective."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            return world_from_process_group(device)
        alone = World(rank=0, size=1, device=device)
        if self._config.mode is MultiGPUMode.NONE:
            return alone
        check_process_group(world_size=_world_size(), launched=env.process_rank().world_size)
        if _world_size() > 1:
            raise ConfigError(
                f"The process group has {_world_size()} ranks, but nothing averages their gradients.",
                fix="Use the model that wrap_model_for_multi_gpu returns, or set enable_multi_gpu=False to train an"
                " independent model in every process.",
            )
        return alone

    @property
    def copies(self) -> int:
        """Number of replicas of the wrapped model, each with its own samples."""
        if self._mode is MultiGPUMode.DISTRIBUTED:
            return _world_size()
        return len(self._devices) if self._mode is MultiGPUMode.DATAPARALLEL else 1

    def synchronize(self) -> None:
        """Synchronize the GPUs of this process, then all ranks. A collective."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if self._mode is MultiGPUMode.DISTRIBUTED:
            dist.barrier()

    def status(self) -> dict[str, Any]:
        """Device status from the driver, without synchronizing the GPUs; unknown values are None."""
        snapshots = self._sampler.take()
        used = [index for index in self._config.device_ids or range(len(snapshots)) if index < len(snapshots)]
        return {
            "device_count": len(used),
            "current_mode": str(self._mode),
            "mode_reason": self._reason,
            "world_size": _world_size(),
            "gpu_memory": [_memory(index, snapshots[index]) for index in used],
            "gpu_utilization": [snapshots[index].utilization_percent for index in used],
        }

    def _with_ddp(self, model: nn.Module, gpus: list[int]) -> nn.Module:
        if is_split(model):
            raise ConfigError(
                "The model's layers are on several devices, but DDP needs the model on one device per process.",
                fix="Load it without a device map.",
            )
        if not trained_parameters(model):
            raise ConfigError("The model has no trainable parameters.", fix="Set requires_grad on some parameters.")
        (device,) = self._devices
        check_device(device, gpus, backend=dist.get_backend(), requested=self._config.backend)
        wrapped, decisions = with_ddp(
            model, world_from_process_group(device), self._config, Traits(compiled=is_compiled(model))
        )
        for choice in decisions.choices:
            logger.info("%s is %s: %s", choice.name, choice.value, choice.reason)
        for warning in decisions.warnings:
            logger.warning("%s", warning)
        return wrapped


def choose_mode(requested: MultiGPUMode, *, world_size: int, launched: int, gpus: int) -> tuple[MultiGPUMode, str]:
    """Resolve the `requested` mode and give the reason.

    `launched`: number of processes that were launched; `world_size`: size of the process group.
    """
    if requested is MultiGPUMode.NONE:
        return requested, "multi-GPU is disabled"
    check_process_group(world_size=world_size, launched=launched)
    if requested is MultiGPUMode.DATAPARALLEL:
        if world_size > 1:
            raise ConfigError(
                f"dataparallel is for one process with several GPUs, but the process group has {world_size} ranks.",
                fix="Use the mode distributed or auto.",
            )
        if gpus < 2:
            raise DeviceError(
                f"dataparallel needs at least two GPUs, but there are {gpus}.", fix="Use the mode none or auto."
            )
        return requested, f"requested, with {gpus} GPUs"
    if world_size > 1:
        return MultiGPUMode.DISTRIBUTED, f"the process group has {world_size} ranks"
    if requested is MultiGPUMode.DISTRIBUTED:
        raise LaunchError(
            "distributed needs several processes, but there is only one.",
            fix="Launch the script with torchrun, or call pantheraml.enable_multi_gpu() first.",
        )
    if gpus > 1:
        logger.warning("using one of %d GPUs: launch the script with torchrun to use all of them", gpus)
        return MultiGPUMode.NONE, f"one process uses one of {gpus} GPUs; torchrun launches one process per GPU"
    return MultiGPUMode.NONE, "there is one device"


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


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_compiled(model: nn.Module) -> bool:
    """Whether any module was compiled by `torch.compile(module)` or `module.compile()`."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules())


def _memory(index: int, snapshot: GPUSnapshot) -> dict[str, Any]:
    free, total = snapshot.free_bytes, snapshot.total_bytes
    return {
        "device": index,
        "allocated_mb": torch.cuda.memory_allocated(index) / MIB,
        "free_mb": None if free is None else free / MIB,
        "total_mb": None if total is None else total / MIB,
    }
