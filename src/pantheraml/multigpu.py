"""Multi-GPU for your own scripts and notebooks: one process per GPU, without a launcher on the command line.

A script calls `enable_multi_gpu()` (or passes `enable_multi_gpu=True` to `FastLanguageModel.from_pretrained`, or is
started with PANTHERAML_ENABLE_MULTIGPU=1) and is relaunched as one rank per GPU. A notebook, which cannot be
relaunched, calls `launch(function)`. `GPUMonitor` and the contexts watch GPUs (`gpu_monitor`).
`MultiGPUTrainingManager` makes trainers for a `GPUConfig` (`gpu_trainers`), in ranks of `launch_distributed_training`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, InterruptedRunError, LaunchError, WorkerError
from pantheraml.devices.probe import probe
from pantheraml.gpu_monitor import GPUConfig, GPUMonitor, gpu_monitoring_context, performance_context
from pantheraml.hooks import multi_gpu
from pantheraml.launch.local import die_with_parent
from pantheraml.launch.script import main_file, relaunch
from pantheraml.planner.processes import check_script_ranks

if TYPE_CHECKING:
    from pantheraml.gpu_trainers import DataParallelTrainer, DistributedDataParallelTrainer
    from pantheraml.gpu_training_manager import MultiGPUTrainingManager

__all__ = [
    "DataParallelTrainer",
    "DistributedDataParallelTrainer",
    "GPUConfig",
    "GPUMonitor",
    "MultiGPUTrainingManager",
    "disable_multi_gpu",
    "enable_multi_gpu",
    "get_multi_gpu_config",
    "gpu_monitoring_context",
    "launch",
    "launch_distributed_training",
    "performance_context",
]

_LAZY = {
    "DataParallelTrainer": "pantheraml.gpu_trainers",
    "DistributedDataParallelTrainer": "pantheraml.gpu_trainers",
    "MultiGPUTrainingManager": "pantheraml.gpu_training_manager",
}
"""Names whose modules build on this one; trainers need torch."""

logger = log.get(__name__)


def enable_multi_gpu(
    num_gpus: int | None = None,
    batch_size_per_gpu: int | None = None,
    gradient_aggregation: str = "mean",
    *,
    aggregation_weights: Sequence[float] | None = None,
) -> None:
    """Run the script as one process per GPU from here on.

    A script started as a single process is relaunched from its beginning as that many ranks, and this call does not
    return in the process that made it; so call it first. A rank, started by any launcher, continues.
    `num_gpus` None: PANTHERAML_NPROC, else every visible GPU; with fewer than two the script continues as it is. On a
    host without GPUs the number is required. PANTHERAML_RELAUNCH=0 disables the relaunch.
    `batch_size_per_gpu` and `gradient_aggregation` (mean, weighted, median, trimmed_mean) apply to the trainers of
    transformers and TRL that are created afterwards, until `disable_multi_gpu`; the order of imports does not matter.
    `aggregation_weights`: one per rank, for weighted.
    A second call replaces the settings of the first.
    """
    settings = multi_gpu.make_settings(batch_size_per_gpu, gradient_aggregation, aggregation_weights)
    if settings != multi_gpu.current():
        _require_no_process_group()
    multi_gpu.require_supported(settings)
    start_ranks(num_gpus, settings)
    multi_gpu.apply(settings)


def disable_multi_gpu() -> None:
    """Undo `enable_multi_gpu` for trainers that are created from here on; ranks that were started remain ranks."""
    multi_gpu.revert()


def get_multi_gpu_config() -> dict[str, Any]:
    """Return what multi-GPU training would use here: the switch, ranks, GPUs, and the settings in force."""
    devices, launched, settings = probe(), env.launched_rank(), multi_gpu.current()
    rank = env.process_rank()
    gpus, fallback = len(devices.gpus), env.script_fallback()
    enabled = env.multi_gpu_requested() or settings is not None
    several = rank.world_size > 1
    return {
        "enabled": enabled,
        "multi_gpu": several or (enabled and gpus > 1),
        "num_gpus": gpus,
        "gpus": [gpu.name for gpu in devices.gpus],
        "note": devices.note,
        "launched": launched is not None,
        "world_size": rank.world_size,
        "rank": rank.rank,
        "local_rank": rank.local_rank,
        "device": f"cuda:{rank.local_rank}" if gpus else "cpu",
        "backend": ("nccl" if gpus else "gloo") if several or gpus > 1 else None,
        "fallback_reason": None if fallback is None else fallback.reason,
        "batch_size_per_gpu": None if settings is None else settings.batch_size_per_gpu,
        "gradient_aggregation": None if settings is None else settings.gradient_aggregation,
    }


def start_ranks(
    num_gpus: int | None = None, settings: multi_gpu.MultiGPUSettings | None = None, *, strict: bool = False
) -> None:
    """Relaunch a single process as one rank per GPU; a rank continues, if there are as many as `num_gpus` says.

    If a rank of a relaunched script cannot use its GPU, rank 0 continues alone with a warning, unless `strict`.
    """
    log.start_for_scripts()
    settings = settings or multi_gpu.MultiGPUSettings()
    launched = env.launched_rank()
    if launched is not None:
        _check_launched(launched, num_gpus)
        settings.check_ranks(launched.world_size)
        if env.was_relaunched():
            die_with_parent()
            _agree_on_gpus(launched, strict=strict)
        if launched.world_size > 1:
            multi_gpu.announce(f"{launched.world_size} processes, {settings}")
        return
    if env.was_relaunched():
        raise LaunchError(
            "This process was relaunched as a rank, but its rank is missing from the environment.",
            fix="Do not unset RANK, LOCAL_RANK and WORLD_SIZE.",
        )
    fallback = env.script_fallback()
    if fallback is not None:
        settings.check_ranks(1)
        logger.warning("%s; the global batch is that of one process", fallback)
        return
    processes, reason = _process_count(num_gpus if num_gpus is not None else env.processes_requested())
    if processes == 1:
        settings.check_ranks(1)
        logger.warning("multi-GPU is enabled, but the script continues as one process: %s", reason)
    elif not env.relaunch_allowed():
        settings.check_ranks(1)
        logger.warning("%s, but the script continues as one process: PANTHERAML_RELAUNCH=0", reason)
    else:
        settings.check_ranks(processes)
        logger.info("relaunching as %d processes: %s", processes, reason)
        relaunch(processes)


def _agree_on_gpus(rank: env.ProcessRank, *, strict: bool) -> None:
    """Let the ranks vote on whether to continue; not without GPUs, where no device fails."""
    if rank.world_size == 1 or not probe().gpus:
        return
    # imported here: a script that only relaunches itself need not wait for torch
    from pantheraml.rendezvous.script_vote import agree_on_gpus

    agree_on_gpus(rank, rank.local_rank, strict=strict)


def _check_launched(launched: env.ProcessRank, num_gpus: int | None) -> None:
    """Raise LaunchError if another number of processes was started than the script asks for."""
    started = launched.local_world_size or launched.world_size
    if num_gpus is None or num_gpus in (started, launched.world_size):
        return
    if type(num_gpus) is not int or num_gpus < 1:
        raise ConfigError(
            f"{num_gpus!r} is not a valid number of processes.", fix="Pass 1 or more, or None for one per GPU."
        )
    raise LaunchError(
        f"num_gpus={num_gpus} is set, but the launcher started {started} process(es).",
        fix=f"Start {num_gpus} (torchrun --nproc-per-node {num_gpus}), or remove num_gpus.",
    )


def _require_no_process_group() -> None:
    """Raise LaunchError if torch.distributed is initialized; a process that has not imported torch cannot have it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise LaunchError(
            "enable_multi_gpu was called after the process group was created: trainers and models of this process"
            " already rely on that group.",
            fix="Call enable_multi_gpu first, before models, training arguments and init_process_group.",
        )


def launch(function: Callable[..., Any], *arguments: Any, nproc: int | None = None) -> list[Any]:
    """Run `function(*arguments)` in `nproc` new processes, the ranks of one group, and return the result of each.

    Made for notebooks. A function of a module is imported in every process. One defined in the notebook exists nowhere
    else, so processes are forked, which is possible until CUDA is initialized. `nproc` None: one per visible GPU. If a
    rank fails, the others are terminated and a WorkerError names it.
    """
    _require_no_rank()
    _require_callable(function)
    processes, _ = _process_count(nproc)
    return _run(function, arguments, processes, _start_method(function, arguments))


def launch_distributed_training(*, world_size: int, train_func: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Run `train_func(rank, world_size, **arguments)` in `world_size` new processes; return the result of each rank.

    `train_func` may be a coroutine function. Otherwise like `launch`: there are no more processes than GPUs, unless the
    host has none.
    """
    _require_no_rank()
    _require_callable(train_func)
    try:
        inspect.signature(train_func).bind(0, world_size, **arguments)
    except TypeError as err:
        raise ConfigError(
            f"train_func does not take these arguments: {err}.",
            fix="It is called as train_func(rank, world_size, **arguments).",
        ) from err
    processes, _ = _process_count(world_size)
    return _run(_as_rank, (train_func, arguments), processes, _start_method(train_func, (arguments,)))


def _as_rank(train_func: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    rank = env.process_rank()
    result = train_func(rank.rank, rank.world_size, **arguments)

    async def awaited() -> Any:
        return await result

    return asyncio.run(awaited()) if inspect.isawaitable(result) else result


_GUARD = 'put the call under `if __name__ == "__main__":`.'


def _require_no_rank() -> None:
    if env.launched_rank() is not None:
        raise LaunchError("This process is already a rank.", fix="Call the function directly.")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise LaunchError(
            "A process that this script started imports the script, and would start processes again.",
            fix=f"In the script, {_GUARD}",
        )


def _require_callable(function: object) -> None:
    if not callable(function):
        raise ConfigError(
            f"{function!r} is not a function.", fix="Pass the function itself, and its arguments separately."
        )


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], processes: int, start: Literal["spawn", "fork"]
) -> list[Any]:
    # imported here: a script that only relaunches itself need not wait for torch
    from pantheraml.rendezvous.elastic_agent import run_function

    ended = run_function(function, arguments, processes=processes, start=start)
    if ended.stopped_by is not None:
        raise InterruptedRunError(f"Stopped by {ended.stopped_by.name}; the {processes} processes were terminated.")
    if ended.failure is not None:
        spawned = start == "spawn" and ended.failure.traceback is None
        error = WorkerError(str(ended.failure), fix=f"Its error is above. In a script, {_GUARD}" if spawned else None)
        if ended.failure.traceback is not None:
            error.add_note(ended.failure.traceback)
        raise error
    return [ended.values[rank] for rank in range(processes)]


def _process_count(requested: int | None) -> tuple[int, str]:
    """Return the number of processes, and the reason."""
    devices = probe()
    gpus = len(devices.gpus)
    if requested is None:
        return max(1, gpus), f"{gpus} GPUs are visible" if gpus else devices.note or "no GPU is visible"
    if type(requested) is not int or requested < 1:
        raise ConfigError(
            f"{requested!r} is not a valid number of processes.", fix="Pass 1 or more, or None for one per GPU."
        )
    check_script_ranks(requested, gpus=gpus, cores=devices.cpu_count)
    asked = f"{requested} {'was' if requested == 1 else 'were'} requested"
    return requested, asked if gpus or requested == 1 else f"{asked}, on CPUs: {devices.note or 'no GPU is visible'}"


def _start_method(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Literal["spawn", "fork"]:
    import torch

    name = getattr(function, "__qualname__", repr(function))
    # Code from standard input has the file name "<stdin>", which a spawned process would try to open.
    from_stdin = getattr(sys.modules["__main__"], "__file__", None) is not None
    if main_file() is None and (from_stdin or function.__module__ == "__main__"):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise LaunchError(
                f"{name} is defined in this session only, and CUDA is already initialized here: it cannot be forked.",
                fix="Restart the session and call launch first, or import the function from a module.",
            )
        return "fork"
    try:
        pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise LaunchError(
            f"{name} and its arguments cannot be sent to other processes: {err}.",
            fix="Use a top-level function of a module, and picklable arguments (names, paths, numbers).",
        ) from err
    return "spawn"


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
