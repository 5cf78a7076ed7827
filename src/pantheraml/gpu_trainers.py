"""`DataParallelTrainer` and `DistributedDataParallelTrainer`: train any `nn.Module` as a `GPUConfig` says.

    trainer = DistributedDataParallelTrainer(GPUConfig(batch_size_per_gpu=4))
    trainer.setup_distributed(rank=rank, world_size=2)
    model = trainer.setup_model(model)
    dataloader = trainer.setup_dataloader(dataset)
    metrics = await trainer.train_epoch(dataloader, epoch)

Ranks train like one process with the same global batch. An epoch runs in a thread, so that a service can await it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import pickle
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from pantheraml.base import env, log
from pantheraml.base.errors import CheckpointError, ConfigError, DeviceError, LaunchError
from pantheraml.base.folders import storage_errors, sync
from pantheraml.engine.module_loop import LossFunction, ModuleLoop, check_loop_arguments
from pantheraml.engine.multi_gpu_wrapper import MultiGPUWrapper
from pantheraml.engine.optimizer_config import OptimizerConfig
from pantheraml.gpu_monitor import GPUConfig, GPUMonitor
from pantheraml.parallel.aggregate import no_op_finish
from pantheraml.parallel.data import has_batch_norm
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.own_loop_configs import (
    GradientClippingConfig,
    NaNHandlingConfig,
    PyTorchDebuggingConfig,
    stability_of,
)
from pantheraml.specs.performance import OptimizationLevel, PerformanceConfig

__all__ = ["DataParallelTrainer", "DistributedDataParallelTrainer"]

logger = log.get(__name__)

LEARNING_RATE = 5e-5
"""Learning rate of the default optimizer, AdamW."""


class _Trainer(ABC):
    def __init__(
        self,
        gpu_config: GPUConfig | None = None,
        *,
        optimizer_config: Mapping[str, Any] | None = None,
        loss_fn: LossFunction | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        """`optimizer_config`: {"class": an optimizer class, "kwargs": its arguments}; None: AdamW at 5e-5.

        `loss_fn(outputs, targets)`, a mean over samples, is for batches of (inputs, targets); without it, the model is
        called with the batch and returns its loss. `max_grad_norm` None: gradients are not clipped. `seed` and the
        number of the epoch give the order of its samples.
        """
        check_loop_arguments(loss_fn, max_grad_norm)
        self.config = gpu_config or GPUConfig()
        self._optimizer_config = OptimizerConfig(optimizer_config or _ADAMW)
        self._loss_fn, self._max_grad_norm, self._seed = loss_fn, max_grad_norm, seed
        self._wrapper: MultiGPUWrapper | None = None
        self._loop: ModuleLoop | None = None
        self._model: nn.Module | None = None
        self._limited: list[int] = []
        """GPUs whose memory is limited for this process."""
        self._busy = threading.Lock()
        self._order = torch.Generator()
        self.optimizer: Optimizer | None = None
        """The optimizer, from `setup_model` on; for a learning rate schedule."""
        log.start_for_scripts()

    # -- what the two differ in

    @abstractmethod
    def _parallel(self, model: nn.Module) -> MultiGPUConfig:
        """Mode and devices; put the model on its device if it is alone there."""

    @property
    def _replicas_here(self) -> int:
        """Replicas of the model in this process."""
        return 1

    # -- steps of a training

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Wrap `model`, and make the optimizer; the result is called, the weights are those of `model`."""
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model is a {type(model).__name__}, not a torch.nn.Module.", fix="Pass the model itself."
            )
        if self._loop is not None:
            raise ConfigError("The trainer has a model already.", fix="Call cleanup() first, or make another trainer.")
        atexit.register(self.cleanup)
        try:
            return self._wrapped(model)
        except BaseException:
            self.cleanup()
            raise

    def _wrapped(self, model: nn.Module) -> nn.Module:
        wrapper = self._joined(self._parallel(model))
        self._limit_memory(wrapper)
        wrapped = wrapper.wrap(model)
        for choice in wrapper.choices:
            if choice.name == "enable_mixed_precision" and not choice.value and self.config.mixed_precision:
                logger.info("mixed_precision is not used: %s", choice.reason)
        optimizer = self._optimizer_config.make(model)
        self._loop = ModuleLoop(
            wrapper,
            wrapped,
            optimizer,
            no_op_finish,
            loss_fn=self._loss_fn,
            stability=stability_of(GradientClippingConfig(), NaNHandlingConfig(), PyTorchDebuggingConfig()),
            max_grad_norm=self._max_grad_norm,
            accumulate=self.config.gradient_accumulation_steps,
        )
        self._model, self.optimizer = model, optimizer
        return wrapped

    def _joined(self, parallel: MultiGPUConfig) -> MultiGPUWrapper:
        if self._wrapper is None:
            self._wrapper = MultiGPUWrapper(
                PerformanceConfig(
                    optimization_level=OptimizationLevel.NONE,
                    enable_mixed_precision=self.config.mixed_precision,
                    multi_gpu_config=parallel,
                )
            )
        return self._wrapper

    def _limit_memory(self, wrapper: MultiGPUWrapper) -> None:
        self._limited = wrapper.gpus if torch.cuda.is_available() else []
        for index in self._limited:
            torch.cuda.set_per_process_memory_fraction(self.config.memory_fraction, index)

    def setup_dataloader(
        self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None, shuffle: bool = True
    ) -> DataLoader[Any]:
        """Return a DataLoader with `batch_size_per_gpu` samples of `dataset` for each GPU; each rank gets its part."""
        if self._loop is None or self._wrapper is None:
            raise ConfigError("The trainer has no model.", fix="Call setup_model() before setup_dataloader().")
        drawn = shuffle and not isinstance(dataset, IterableDataset)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self.config.batch_size_per_gpu * self._replicas_here,
            shuffle=drawn,
            generator=self._order if drawn else None,
            collate_fn=collate_fn,
        )
        return self._wrapper.shard(loader)

    async def train_epoch(self, dataloader: DataLoader[Any], epoch: int) -> dict[str, Any]:
        """Train on every sample of `dataloader` once; return loss, steps, samples, seconds of all ranks. A collective.

        It runs in a thread. Cancelling the task does not stop the epoch, which other ranks rely on.
        """
        return await asyncio.to_thread(self._train_epoch, dataloader, epoch)

    def _train_epoch(self, dataloader: DataLoader[Any], epoch: int) -> dict[str, Any]:
        loop, wrapper = self._loop, self._wrapper
        if loop is None or wrapper is None:
            raise ConfigError("The trainer has no model.", fix="Call setup_model() before train_epoch().")
        if type(epoch) is not int or epoch < 0:
            raise ConfigError(
                f"epoch={epoch!r} is not a number of an epoch.",
                fix="Pass 0, 1, ...: the order of the samples depends on it.",
            )
        with self._exclusively("Another epoch is being trained."), _on(wrapper.device):
            self._order.manual_seed(self._seed * 1_000_003 + epoch)
            set_epoch = getattr(dataloader.sampler, "set_epoch", None)
            if set_epoch is not None and getattr(dataloader, "generator", None) is not self._order:
                set_epoch(epoch)  # a DataLoader of the user, with a DistributedSampler
            stats = loop.run(wrapper.shard(dataloader))
        return {"epoch": epoch, **stats, "world_size": dist.get_world_size() if dist.is_initialized() else 1}

    @contextlib.contextmanager
    def _exclusively(self, otherwise: str) -> Any:
        if not self._busy.acquire(blocking=False):
            raise ConfigError(otherwise, fix="Await it first.")
        try:
            yield
        finally:
            self._busy.release()

    def cleanup(self) -> None:
        """Leave the process group, unless you initialized it, and lift the limit of memory. May be called again."""
        atexit.unregister(self.cleanup)
        self._loop = self._model = self.optimizer = None
        for index in self._limited:
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        self._limited = []
        if self._wrapper is not None:
            self._wrapper.close()
            self._wrapper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


class DataParallelTrainer(_Trainer):
    """One process that replicates the model on its GPUs for each batch (`nn.DataParallel`).

    Without `gpu_ids` it takes the GPUs that are healthy and free; if these are fewer than two, it trains on one device
    and says so. `gpu_ids` that are not there are an error.
    """

    _gpus: tuple[int, ...] = ()

    def _parallel(self, model: nn.Module) -> MultiGPUConfig:
        if self.config.distributed_training:
            raise ConfigError(
                "distributed_training=True is for DistributedDataParallelTrainer.", fix="Use it, or set it to False."
            )
        self._gpus, reason = self._chosen()
        several = len(self._gpus) > 1 or env.process_rank().world_size > 1  # of several processes, the wrapper refuses
        if not several:
            device = torch.device("cuda", self._gpus[0]) if self._gpus else torch.device("cpu")
            logger.warning("training on %s instead of several GPUs: %s", device, reason)
            model.to(device)
        elif self.config.sync_batch_norm and has_batch_norm(model):
            logger.warning("batch norm is per GPU: sync_batch_norm needs DistributedDataParallelTrainer")
        return MultiGPUConfig(
            mode=MultiGPUMode.DATAPARALLEL if several else MultiGPUMode.NONE,
            device_ids=list(self._gpus) or None,
            backend=self.config.backend,
        )

    def _chosen(self) -> tuple[tuple[int, ...], str]:
        config = self.config
        missing = [index for index in config.gpu_ids if index >= torch.cuda.device_count()]
        if missing:
            raise DeviceError(
                f"GPU {missing[0]} was requested, but {torch.cuda.device_count()} GPU(s) are visible.",
                fix="Correct gpu_ids; `pantheraml gpus` lists them.",
            )
        if config.gpu_ids:
            asked = tuple(config.gpu_ids if config.use_multi_gpu else config.gpu_ids[:1])
            return asked, "as configured"
        found = GPUMonitor(config).select_gpus()
        return found.indices, found.reason

    @property
    def _replicas_here(self) -> int:
        return max(1, len(self._gpus))


class DistributedDataParallelTrainer(_Trainer):
    """One rank of several, one per GPU (DDP). `gpu_ids`: GPUs of this node; the rank on it chooses one; empty: all.

    Without GPUs, ranks are CPU processes that communicate over gloo.
    """

    _rank: MultiGPUConfig | None = None

    def setup_distributed(
        self, rank: int | None = None, world_size: int | None = None, *, local_rank: int | None = None
    ) -> None:
        """Join the other ranks. A collective.

        Under a launcher (`torchrun`, `launch_distributed_training`) both numbers may be left out, and must be those of
        the launcher otherwise. Processes that you start yourself also need the environment variables MASTER_ADDR and
        MASTER_PORT, and on several nodes `local_rank`.
        """
        config = self._of_rank(rank, world_size, local_rank)
        if self._rank is not None and self._rank != config:
            raise ConfigError("This trainer has joined as another rank already.", fix="Call cleanup() first.")
        if config.mode is MultiGPUMode.NONE:
            logger.warning("training in one process: world_size is 1")
        self._rank = config
        self._joined(config).setup()
        atexit.register(self.cleanup)

    def _of_rank(self, rank: int | None, world_size: int | None, local_rank: int | None) -> MultiGPUConfig:
        launched = env.launched_rank()
        if launched is not None:
            for name, given, actual in (("rank", rank, launched.rank), ("world_size", world_size, launched.world_size)):
                if given not in (None, actual):
                    raise LaunchError(
                        f"{name}={given} is set, but the launcher gave this process {name}={actual}.",
                        fix=f"Pass {name}={actual}, or leave it out.",
                    )
            return self._config_of(launched.world_size)
        if world_size in (None, 1) and rank in (None, 0):
            return self._config_of(1)
        if rank is None or world_size is None:
            raise ConfigError("rank and world_size must be set together.", fix="Or start the script with torchrun.")
        return self._config_of(world_size, rank, rank if local_rank is None else local_rank)

    def _config_of(self, world_size: int, rank: int | None = None, local_rank: int | None = None) -> MultiGPUConfig:
        config = self.config
        if world_size > 1 and not config.use_multi_gpu:
            raise ConfigError(
                f"use_multi_gpu is False, but there are {world_size} ranks: each would train a model of its own.",
                fix="Set use_multi_gpu=True, or start one process.",
            )
        return MultiGPUConfig(
            mode=MultiGPUMode.DISTRIBUTED if world_size > 1 else MultiGPUMode.NONE,
            world_size=world_size,
            device_ids=config.gpu_ids or None,
            backend=config.backend,
            sync_bn=config.sync_batch_norm,
            static_graph=config.gradient_accumulation_steps == 1,  # it cannot begin with a backward without exchange
            rank=rank,
            local_rank=local_rank,
        )

    def _parallel(self, model: nn.Module) -> MultiGPUConfig:
        if self._rank is None:
            self.setup_distributed()
        assert self._rank is not None
        if self._rank.mode is MultiGPUMode.NONE and torch.cuda.is_available():
            model.to(torch.device("cuda", self.config.gpu_ids[0] if self.config.gpu_ids else 0))
        return self._rank

    def save_checkpoint(self, path: str | os.PathLike[str], epoch: int) -> None:
        """Save weights, optimizer and `epoch` in one file, which rank 0 writes. A collective.

        Random states are not in it: what dropout draws differs after loading. The order of an epoch does not.
        """
        if self._model is None or self.optimizer is None:
            raise ConfigError("The trainer has no model.", fix="Call setup_model() before save_checkpoint().")
        problem = None
        with self._exclusively("An epoch is being trained."):
            if self._main:
                state = {
                    "epoch": epoch,
                    "model": self._model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                }
                try:
                    _write(Path(path), state)
                except CheckpointError as err:
                    problem = err
            if self._agree(problem is not None) and problem is None:
                problem = CheckpointError("Rank 0 could not write the checkpoint.", where=str(path))
        if problem is not None:
            raise problem

    def load_checkpoint(self, path: str | os.PathLike[str]) -> int:
        """Load what `save_checkpoint` saved, for any number of ranks; return its epoch. A collective."""
        if self._model is None or self.optimizer is None:
            raise ConfigError("The trainer has no model.", fix="Call setup_model() before load_checkpoint().")
        problem, state = None, {}
        try:
            state = _read(Path(path), self._model, self.optimizer)
        except CheckpointError as err:
            problem = err
        if self._agree(problem is not None) and problem is None:
            problem = CheckpointError("Another rank cannot read the checkpoint.", where=str(path))
        if problem is not None:
            raise problem
        self._model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["epoch"])

    @property
    def _main(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0

    def _agree(self, failed: bool) -> bool:
        """Whether any rank has failed; all ranks then do the same."""
        if not dist.is_initialized():
            return failed
        on_gpu = dist.get_backend() == "nccl"
        flag = torch.tensor(int(failed), device=torch.cuda.current_device() if on_gpu else "cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def cleanup(self) -> None:
        self._rank = None
        super().cleanup()


_ADAMW = {"class": AdamW, "kwargs": {"lr": LEARNING_RATE}}


def _on(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Make `device` current in this thread: each thread has a current GPU of its own."""
    cuda = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if cuda else contextlib.nullcontext()


def _write(path: Path, state: dict[str, Any]) -> None:
    scratch = path.with_name(f".partial-{path.name}.{secrets.token_hex(8)}")
    try:
        with storage_errors(path):
            torch.save(state, scratch)
            sync(scratch)
            os.replace(scratch, path)
    except RuntimeError as err:  # torch's own writer
        raise CheckpointError(
            f"Saving {path.name} failed: {err}.",
            where=str(path),
            fix="Free space on its disk, and check that the folder is writable.",
        ) from err
    finally:
        scratch.unlink(missing_ok=True)


def _read(path: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Read and check everything first, so that nothing is half loaded. Nothing in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as err:
        raise CheckpointError(
            f"There is no checkpoint {path}.", fix="Give the path that was passed to save_checkpoint."
        ) from err
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as err:
        raise CheckpointError(
            f"{path.name} cannot be read as a checkpoint.",
            where=str(path),
            fix="It may be truncated: use an earlier one.",
        ) from err
    if not isinstance(state, dict) or set(state) != {"epoch", "model", "optimizer"}:
        raise CheckpointError(
            f"{path.name} is not a checkpoint of this trainer.",
            where=str(path),
            fix="Give a file that save_checkpoint wrote.",
        )
    try:
        shapes = {name: tuple(value.shape) for name, value in state["model"].items()}
        groups = [len(group["params"]) for group in state["optimizer"]["param_groups"]]
    except (AttributeError, KeyError, TypeError) as err:
        raise CheckpointError(
            f"{path.name} is not a checkpoint of this trainer.",
            where=str(path),
            fix="Give a file that save_checkpoint wrote.",
        ) from err
    if shapes != {name: tuple(value.shape) for name, value in model.state_dict().items()} or groups != [
        len(group["params"]) for group in optimizer.param_groups
    ]:
        raise CheckpointError(
            f"{path.name} is a checkpoint of another model.",
            where=str(path),
            fix="Build the model and the optimizer as they were when it was saved.",
        )
    return state
