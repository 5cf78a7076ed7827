"""Multi-GPU wrapper for custom training loops: joins the ranks, wraps the model, shards the loader, reports the state.

Ranks come from a launcher (`torchrun`, Slurm, rank settings of the user) or, for a plain script on several GPUs, from
relaunching it once. A requested mode that is unavailable is an error; there is no silent fallback.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, DeviceError, UnsupportedModelError
from pantheraml.devices.probe import cpu_count
from pantheraml.engine import tuning
from pantheraml.engine.batch_size import ForwardInputs, Measured, choose_size, free_on, probe_sizes
from pantheraml.engine.guard.own_loop import trained_parameters
from pantheraml.engine.multi_gpu_mode import (
    check_device,
    check_process_group,
    choose_mode,
    gpus_of_process,
    relaunch_count,
    why_no_replicas,
)
from pantheraml.engine.multi_gpu_status import Monitor
from pantheraml.engine.parallelize import Traits, with_ddp
from pantheraml.launch.local import die_with_parent
from pantheraml.launch.ranks import own_rank
from pantheraml.launch.script import relaunch, why_not_relaunch
from pantheraml.parallel import fsdp
from pantheraml.parallel.device_map import FOR_WEIGHTS, Device, is_split, map_by_split_points, place, split
from pantheraml.parallel.layout import make_layout
from pantheraml.parallel.micro_batches import MicroBatches
from pantheraml.parallel.process_group import World, join_process_group, leave_group, world_from_process_group
from pantheraml.parallel.sharded_loader import (
    BatchWeight,
    rebuilt_loader,
    shard_loader,
    weigh_gradients,
)
from pantheraml.planner.processes import check_script_ranks
from pantheraml.rendezvous.script_vote import agree_on_gpus
from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.performance import PerformanceConfig
from pantheraml.specs.plan import Choice

logger = log.get_manager()

MICRO_BATCHES_PER_GPU = 2


class LiveSettings(Protocol):
    """Settings that are read in every forward, so that they can be changed after the model was wrapped."""

    @property
    def checkpointing(self) -> tuning.Checkpointing: ...
    @property
    def multi_gpu_bucket_cap_mb(self) -> int: ...
    @property
    def multi_gpu_static_graph(self) -> bool: ...


class MultiGPUWrapper:
    def __init__(self, config: PerformanceConfig, live: LiveSettings | None = None) -> None:
        self._settings, self._live = config, live or config
        self._config = config.multi_gpu
        self._mode, self._reason = MultiGPUMode.NONE, "no model was wrapped yet"
        self._devices: list[torch.device] = []
        """Devices of the wrapped model in this process."""
        self._model: nn.Module | None = None
        """The user's module inside the wrapper."""
        self._weight = BatchWeight()
        self._matmuls = tuning.MatmulPrecision()
        self._owns_group = False
        self._monitor = Monitor(self._config)
        self._applied: tuple[Any, ...] = ()
        self._measured: dict[int, list[Measured]] = {}
        self.choices: list[Choice] = []
        """Choices made for the model, the optimizer and the loader."""

    # -- ranks

    @property
    def gpus(self) -> list[int]:
        """Indices of the GPUs of this process; DeviceError for a requested one that is not there."""
        return self._own_gpus

    @property
    def _gpus(self) -> list[int]:
        """Indices of the GPUs to use on this node."""
        visible = list(range(torch.cuda.device_count()))
        requested = self._config.device_ids
        if requested is not None and (not requested or len(set(requested)) != len(requested)):
            raise ConfigError(
                f"device_ids={requested} must name at least one GPU, each once.", fix="See `pantheraml gpus`."
            )
        missing = [index for index in requested or () if index not in visible]
        if missing:
            raise DeviceError(
                f"GPU {missing[0]} was requested, but {len(visible)} GPU(s) are visible.", fix="See `pantheraml gpus`."
            )
        return visible if requested is None else list(requested)

    @property
    def _own_gpus(self) -> list[int]:
        """Indices of the GPUs of this process."""
        rank = own_rank(self._config)
        if rank is None or _world_size() == 1:
            return self._gpus
        return gpus_of_process(self._gpus, rank.local_rank, rank.local_world_size or _world_size())

    def setup(self) -> None:
        """Relaunch a lone script as one rank per GPU, or join the ranks that were started. A collective."""
        if self._config.mode in (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL) or dist.is_initialized():
            return
        rank = own_rank(self._config)
        if rank is None:
            self._relaunch()
        elif rank.world_size > 1:
            if env.was_relaunched():
                die_with_parent()
            gpus = self._gpus
            backend = self._config.backend if gpus else "gloo"
            index = gpus[rank.local_rank % len(gpus)] if gpus else 0
            if env.was_relaunched() and gpus:
                agree_on_gpus(rank, index, strict=self._config.strict or self._config.mode is not MultiGPUMode.AUTO)
            device = torch.device("cuda", index) if backend == "nccl" else torch.device("cpu")
            retries, timeout = self._config.max_retries, self._config.timeout_seconds
            join_process_group(rank, device, backend, timeout_seconds=timeout, max_retries=retries)
            self._owns_group = True
            logger.info("joined %d ranks over %s", rank.world_size, backend)

    def _relaunch(self) -> None:
        fallback = env.script_fallback()
        if fallback is not None:
            logger.warning("%s; the global batch is that of one process", fallback)
            return
        visible = torch.cuda.device_count()
        if any(index >= visible for index in self._config.device_ids or ()):
            return  # `wrap` raises, where callers expect it
        gpus = len(self._gpus)
        count = relaunch_count(self._config, gpus, env.processes_requested())
        if count is None or not env.relaunch_allowed() or why_not_relaunch() is not None:
            return
        check_script_ranks(count, gpus=gpus, cores=cpu_count())
        where = "one per GPU" if gpus else "on CPUs: no GPU is visible"
        logger.info("relaunching the script as %d processes, %s", count, where)
        relaunch(count)

    def close(self) -> None:
        """Leave the process group, if `setup` joined it, and restore settings of the process. May be called again."""
        self._matmuls.restore()
        self._model, self._devices = None, []
        self._monitor.forget()
        if self._owns_group:
            self._owns_group = False
            if dist.is_initialized():
                leave_group()
        self._mode, self._reason = MultiGPUMode.NONE, "the manager was closed"

    # -- model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap `model` for its mode, or return it as it is. A collective if there are several processes."""
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model is a {type(model).__name__}, not a torch.nn.Module.", fix="Pass the model itself."
            )
        if isinstance(model, DistributedDataParallel | DataParallel | FSDPModule | MicroBatches):
            raise ConfigError(f"The model is a {type(model).__name__} already.", fix="Pass the model inside it.")
        self._config = self._settings.multi_gpu
        self.setup()
        gpus = self._own_gpus
        obstacle = why_no_replicas(model, self._output_first(gpus)[0] if gpus else None)
        mode, reason = choose_mode(
            self._config,
            world_size=_world_size(),
            launched=env.process_rank().world_size,
            gpus=len(gpus),
            why_no_replicas=obstacle,
        )
        log_as = logger.warning if mode is MultiGPUMode.NONE and len(gpus) > 1 else logger.info
        log_as("multi-GPU mode %s: %s", mode, reason)
        self.choices = []
        self._move(model, mode, gpus)
        self._tune(model)
        wrapped = self._parallel(model, mode, gpus)
        self._mode, self._reason, self._model = mode, reason, model
        self._measured = {}
        self._monitor.watch(wrapped)
        wrapped.register_forward_pre_hook(partial(_follow_settings, self), with_kwargs=True)
        return wrapped

    def _move(self, model: nn.Module, mode: MultiGPUMode, gpus: list[int]) -> None:
        """Put `model` on this process's GPU, in place, if its mode needs it there."""
        nccl = _world_size() > 1 and dist.get_backend() == "nccl"
        if mode is MultiGPUMode.DATAPARALLEL:
            _to_gpu(model, self._output_first(gpus)[0])
        elif nccl and gpus and mode is not MultiGPUMode.NONE and _on_host(model):
            _to_gpu(model, gpus[0])
        self._devices = sorted({parameter.device for parameter in model.parameters()}, key=str)

    def _tune(self, model: nn.Module) -> None:
        device = self._devices[0] if self._devices else torch.device("cpu")
        self.choices += [
            tuning.use_mixed_precision(model, self._settings, device),
            self._matmuls.apply(self._settings, device),
            tuning.checkpoint_layers(model, self._live.checkpointing),
            tuning.compile_module(model, self._settings, device),
        ]
        self._applied = (
            self._live.checkpointing,
            self._live.multi_gpu_bucket_cap_mb,
            self._live.multi_gpu_static_graph,
        )
        for choice in self.choices:
            logger.debug("%s is %s: %s", choice.name, choice.value, choice.reason)

    def _parallel(self, model: nn.Module, mode: MultiGPUMode, gpus: list[int]) -> nn.Module:
        if mode is MultiGPUMode.DATAPARALLEL:
            ordered = self._output_first(gpus)
            self._devices = [torch.device("cuda", index) for index in ordered]
            return replicate(model, ordered)
        if mode is MultiGPUMode.DISTRIBUTED:
            return self._with_ddp(model)
        if mode is not MultiGPUMode.HYBRID:
            return model
        if self._config.hybrid_strategy == "data_parallel":
            return self._with_fsdp(model)
        return self._with_layers_on(gpus, model)

    def _output_first(self, gpus: list[int]) -> list[int]:
        """`nn.DataParallel` gathers on its first GPU, which holds the weights."""
        output = self._config.output_device
        if output is None:
            return gpus
        if output not in gpus:
            raise ConfigError(
                f"output_device={output} is not among the GPUs to use: {', '.join(map(str, gpus))}.",
                fix="Choose one of them.",
            )
        return [output, *(index for index in gpus if index != output)]

    def _with_layers_on(self, gpus: list[int], model: nn.Module) -> nn.Module:
        """Put successive layers on successive GPUs of this process, in place; pipelined if requested."""
        room: dict[Device, int] = {index: int(FOR_WEIGHTS * torch.cuda.mem_get_info(index)[0]) for index in gpus}
        points = self._settings.split_points
        device_map = "balanced" if points is None else map_by_split_points(model, points, list(room))
        split(model, place(model, device_map, room))
        self._devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
        wrapped: nn.Module = model
        if self._config.hybrid_strategy == "pipeline":
            wrapped = MicroBatches(model, self._settings.micro_batches or MICRO_BATCHES_PER_GPU * len(gpus))
        return wrapped if _world_size() == 1 else self._ddp_over(wrapped, self._devices[0])

    def _with_fsdp(self, model: nn.Module) -> nn.Module:
        (device,) = self._devices or [torch.device("cpu")]
        _require_trainable(model)
        mesh = make_layout(ParallelDims(shard=_world_size()), device.type).submesh("shard")
        fsdp.shard_parameters(model, tuning.repeated_layers(model), mesh)
        weigh_gradients(model, self._weight, scale=1 / _world_size())  # shards are sums over ranks
        return model

    def _with_ddp(self, model: nn.Module) -> nn.Module:
        if is_split(model):
            raise ConfigError(
                "The model's layers are on several devices, but DDP needs the model on one device per process.",
                fix="Load it without a device map.",
            )
        _require_trainable(model)
        (device,) = self._devices
        check_device(device, self._gpus, backend=dist.get_backend(), requested=self._config.backend)
        return self._ddp_over(model, device)

    def _ddp_over(self, model: nn.Module, device: torch.device) -> nn.Module:
        traits = Traits(compiled=is_compiled(model))
        wrapped, decisions = with_ddp(model, world_from_process_group(device), self._config, traits)
        weigh_gradients(wrapped, self._weight)
        for choice in decisions.choices:
            logger.info("%s is %s: %s", choice.name, choice.value, choice.reason)
        for warning in decisions.warnings:
            logger.warning("%s", warning)
        self.choices += decisions.choices
        return wrapped

    @property
    def _current(self) -> tuple[Any, ...]:
        live = self._live
        return live.checkpointing, live.multi_gpu_bucket_cap_mb, live.multi_gpu_static_graph

    def follow_settings(self) -> None:
        """Apply settings that were changed since the model was wrapped, or say that they come too late."""
        now = self._current
        if now == self._applied or self._model is None:
            return
        if now[0] != self._applied[0]:
            choice = tuning.checkpoint_layers(self._model, now[0])
            self.choices = [choice if one.name == choice.name else one for one in self.choices]
            self._measured = {}
            logger.info("%s is %s: %s", choice.name, choice.value, choice.reason)
        if now[1:] != self._applied[1:] and self._mode is not MultiGPUMode.NONE:
            logger.warning("bucket_cap_mb and static_graph take effect when a model is wrapped: wrap it again")
        self._applied = now

    def saw(self, inputs: ForwardInputs) -> None:
        self._monitor.saw(inputs)

    # -- loader

    def shard(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return `loader` with this rank's samples and the level's settings, or as it is. A collective."""
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"dataloader is a {type(loader).__name__}, not a torch DataLoader.",
                fix="Pass DataLoader(dataset, batch_size=...).",
            )
        device = self._devices[0] if self._devices else torch.device("cpu")
        changed = tuning.loader_changes(loader, self._settings, device)
        self.setup()
        if _world_size() > 1 and self._config.mode not in (MultiGPUMode.NONE, MultiGPUMode.DATAPARALLEL):
            return shard_loader(loader, self._weight, **changed)
        return rebuilt_loader(loader, **changed) if changed else loader

    def sum_losses(self, sums: bool) -> None:
        """Set whether the user's loss is a sum over samples (of the global batch) instead of a mean."""
        self._weight.sum_over = _world_size() if sums and self.copies > 1 else None

    @property
    def batch_share(self) -> float:
        """Weight of this rank's current batch relative to the mean over ranks; set by loaders of `shard`."""
        return self._weight.share

    @batch_share.setter
    def batch_share(self, share: float) -> None:
        self._weight.share = share

    # -- queries

    @property
    def device(self) -> torch.device | None:
        """The one device of the wrapped model; None before it is wrapped, and if there are several."""
        return self._devices[0] if len(self._devices) == 1 else None

    @property
    def inner(self) -> nn.Module | None:
        return self._model

    @property
    def mode(self) -> MultiGPUMode:
        return self._mode

    @property
    def copies(self) -> int:
        """Number of replicas of the wrapped model, each with its own samples."""
        if self._mode is MultiGPUMode.DATAPARALLEL:
            return len(self._devices)
        return _world_size() if self._mode in (MultiGPUMode.DISTRIBUTED, MultiGPUMode.HYBRID) else 1

    def peers(self, model: nn.Module) -> World:
        """World of the ranks that train `model` together; size 1 if multi-GPU is disabled. A collective."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UnsupportedModelError(
                "The guard checks whole gradients, but hybrid_strategy=data_parallel shards them.",
                fix="Use the mode distributed, or `pantheraml train` with parallel.shard.",
            )
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

    def synchronize(self) -> None:
        """Synchronize the GPUs of this process, then all ranks. A collective."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if self._mode in (MultiGPUMode.DISTRIBUTED, MultiGPUMode.HYBRID) and _world_size() > 1:
            dist.barrier()

    def status(self) -> dict[str, Any]:
        """Device status from the driver, without synchronizing the GPUs; unknown values are None."""
        return {
            **self._monitor.devices(),
            "current_mode": str(self._mode),
            "mode_reason": self._reason,
            "fallback_reason": None if (fallback := env.script_fallback()) is None else fallback.reason,
            "world_size": _world_size(),
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "training_stats": self._monitor.training(),
        }

    def optimal_batch_size(self, base: int) -> int:
        """Return the global batch size that gives each replica up to `base` samples. A collective."""
        if base < 1:
            raise ConfigError(f"{base} is not a valid batch size.", fix="Pass 1 or more.")
        size, reason = base, "no training batch was seen yet, so only replicas are counted"
        inputs, model = self._monitor.inputs, self._model
        if model is not None and inputs is not None and not isinstance(model, FSDPModule):
            if inputs.rows is None:
                reason = "the rows of the model's inputs cannot be counted"
            else:
                if base not in self._measured:
                    self._measured[base] = probe_sizes(model, inputs, base)
                size, reason = choose_size(self._measured[base], base, free_on(model))
        if self.copies > 1 and self._mode is not MultiGPUMode.DATAPARALLEL:
            size = _smallest(size, self._devices[0])
        logger.debug("batch size %d for each of %d replicas: %s", size, self.copies, reason)
        return max(1, size) * self.copies


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a hook of a compiled model would be traced
def _follow_settings(wrapper: MultiGPUWrapper, module: nn.Module, args: Any, kwargs: Any) -> None:
    wrapper.follow_settings()
    if module.training and torch.is_grad_enabled():
        wrapper.saw(ForwardInputs(args, kwargs))


def replicate(model: nn.Module, gpus: list[int]) -> nn.Module:
    return DataParallel(model, device_ids=gpus)


def _on_host(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _to_gpu(model: nn.Module, index: int) -> None:
    model.to(torch.device("cuda", index))


def _require_trainable(model: nn.Module) -> None:
    if not trained_parameters(model):
        raise ConfigError("The model has no trainable parameters.", fix="Set requires_grad on some parameters.")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _smallest(value: int, device: torch.device) -> int:
    agreed = torch.tensor(value, device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed.item())


def is_compiled(model: nn.Module) -> bool:
    """Whether any module was compiled by `torch.compile(module)` or `module.compile()`."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in model.modules())
