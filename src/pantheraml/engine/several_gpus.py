"""A model of people's own training loop on several GPUs: how it is wrapped, and what is known of the devices.

Processes are somebody else's to start (`torchrun`, `pantheraml.enable_multi_gpu`) and to bring together
(`torch.distributed.init_process_group`). What was asked for and cannot be had is an error, never something else.
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
from pantheraml.devices.sampler import GPUSnapshot, Sampler
from pantheraml.engine.guard.own_loop import trained_parameters
from pantheraml.engine.parallelize import Traits, with_ddp
from pantheraml.parallel.process_group import World, joined_world
from pantheraml.parallel.split import is_split
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode

logger = log.get(__name__)

MIB = 2**20


class SeveralGPUs:
    def __init__(self, config: MultiGPUConfig) -> None:
        self._config, self._sampler = config, Sampler()
        self._mode, self._reason = MultiGPUMode.NONE, "no model was wrapped yet"
        self._devices: list[torch.device] = []
        """Where the wrapped model computes in this process."""

    @property
    def _gpus(self) -> list[int]:
        """Those that may be used, by torch's numbers."""
        there = list(range(torch.cuda.device_count()))
        asked = self._config.device_ids
        missing = [index for index in asked or () if index not in there]
        if missing:
            raise DeviceError(
                f"GPU {missing[0]} was asked for, but {len(there)} GPU(s) are visible.", todo="See `pantheraml gpus`."
            )
        return there if asked is None else list(asked)

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` under DDP or DataParallel, or as it is. With several processes a collective."""
        gpus = self._gpus
        mode, reason = choose_mode(
            self._config.mode, met=_world_size(), started=env.process_rank().world_size, gpus=len(gpus)
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
        """The processes that `model` is shared with; itself alone where several GPUs are switched off. A collective."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            return joined_world(device)
        alone = World(rank=0, size=1, device=device)
        if self._config.mode is MultiGPUMode.NONE:
            return alone
        check_met(met=_world_size(), started=env.process_rank().world_size)
        if _world_size() > 1:
            raise ConfigError(
                f"{_world_size()} processes have met, but nothing takes the mean of their gradients.",
                todo="Use the model that wrap_model_for_multi_gpu returns, or set enable_multi_gpu=False to have every"
                " process train a model of its own.",
            )
        return alone

    @property
    def copies(self) -> int:
        """Of the wrapped model, each of which sees other samples."""
        if self._mode is MultiGPUMode.DISTRIBUTED:
            return _world_size()
        return len(self._devices) if self._mode is MultiGPUMode.DATAPARALLEL else 1

    def synchronise(self) -> None:
        """Wait for what the GPUs of this process still have to do, and then for its peers. A collective."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if self._mode is MultiGPUMode.DISTRIBUTED:
            dist.barrier()

    def status(self) -> dict[str, Any]:
        """Asks the driver, not the GPUs, which go on; what it does not tell is None."""
        snapshots = self._sampler.take()
        used = [index for index in self._config.device_ids or range(len(snapshots)) if index < len(snapshots)]
        return {
            "device_count": len(used),
            "current_mode": str(self._mode),
            "mode_reason": self._reason,
            "world_size": _world_size(),
            "gpu_memory": [_memory(index, snapshots[index]) for index in used],
            "gpu_utilization": [snapshots[index].utilisation_percent for index in used],
        }

    def _with_ddp(self, model: nn.Module, gpus: list[int]) -> nn.Module:
        if is_split(model):
            raise ConfigError(
                "The layers of the model are on several devices, but each process needs it on one.",
                todo="Load it without a device map.",
            )
        if not trained_parameters(model):
            raise ConfigError("No parameter of the model is trained.", todo="Set requires_grad on some.")
        (device,) = self._devices
        check_place(device, gpus, backend=dist.get_backend(), asked=self._config.backend)
        wrapped, decided = with_ddp(model, joined_world(device), self._config, Traits(compiled=is_compiled(model)))
        for choice in decided.choices:
            logger.info("%s is %s: %s", choice.name, choice.value, choice.reason)
        for warning in decided.warnings:
            logger.warning("%s", warning)
        return wrapped


def choose_mode(asked: MultiGPUMode, *, met: int, started: int, gpus: int) -> tuple[MultiGPUMode, str]:
    """What `asked` comes to, and why, where `started` processes were started, of which `met` are in one group."""
    if asked is MultiGPUMode.NONE:
        return asked, "several GPUs are switched off"
    check_met(met=met, started=started)
    if asked is MultiGPUMode.DATAPARALLEL:
        if met > 1:
            raise ConfigError(
                f"dataparallel is for one process with several GPUs, but {met} processes have met.",
                todo="Use the mode distributed or auto.",
            )
        if gpus < 2:
            raise DeviceError(
                f"dataparallel needs at least two GPUs, but there are {gpus}.", todo="Use the mode none or auto."
            )
        return asked, f"asked for, with {gpus} GPUs"
    if met > 1:
        return MultiGPUMode.DISTRIBUTED, f"{met} processes have met"
    if asked is MultiGPUMode.DISTRIBUTED:
        raise LaunchError(
            "distributed needs several processes, but this one is alone.",
            todo="Start the script with torchrun, or call pantheraml.enable_multi_gpu() first.",
        )
    if gpus > 1:
        logger.warning("one process uses one of %d GPUs: start the script with torchrun to use all", gpus)
        return MultiGPUMode.NONE, f"one process uses one of {gpus} GPUs; torchrun starts one for each"
    return MultiGPUMode.NONE, "there is one device"


def check_place(device: torch.device, gpus: Sequence[int], *, backend: str, asked: str) -> None:
    """Whether processes that talk through `backend` can share a model of which this one has a copy on `device`."""
    if device.type == "cpu":
        if backend == "nccl":
            raise DeviceError("The processes talk through nccl, but the model is on the CPU.", todo="Move it to a GPU.")
        return
    if device.index not in gpus:
        raise DeviceError(
            f"The model is on {device}, which is not among the GPUs to use: {', '.join(map(str, gpus))}.",
            todo="Move it to one of them, or change multi_gpu_device_ids.",
        )
    if backend != asked:
        raise ConfigError(
            f"The processes talk through {backend}, but {asked} was asked for.",
            todo=f"Call init_process_group('{asked}'), or set multi_gpu_backend='{backend}'.",
        )


def check_met(*, met: int, started: int) -> None:
    """LaunchError for processes that were started together and know nothing of each other."""
    if started > 1 and met == 1:
        raise LaunchError(
            f"{started} processes were started, but they have not met: each would train a model of its own.",
            todo="Call torch.distributed.init_process_group() first, or set enable_multi_gpu=False.",
        )


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_compiled(model: nn.Module) -> bool:
    """By `torch.compile(module)`, or by `module.compile()`."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules())


def _memory(index: int, snapshot: GPUSnapshot) -> dict[str, Any]:
    free, total = snapshot.free_bytes, snapshot.total_bytes
    return {
        "device": index,
        "allocated_mb": torch.cuda.memory_allocated(index) / MIB,
        "free_mb": None if free is None else free / MIB,
        "total_mb": None if total is None else total / MIB,
    }
