"""Multi-GPU for your own scripts and notebooks: one process per GPU, without a launcher on the command line.

A script calls `enable_multi_gpu()` (or passes `enable_multi_gpu=True` to `FastLanguageModel.from_pretrained`, or is
started with PANTHERAML_ENABLE_MULTIGPU=1) and is relaunched as one rank per GPU. A notebook, which cannot be
relaunched, calls `launch(function)`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any, Literal

from pantheraml.base import env, log
from pantheraml.base.errors import ConfigError, DeviceError, InterruptedRunError, LaunchError, WorkerError
from pantheraml.devices.probe import probe
from pantheraml.launch.local import die_with_parent
from pantheraml.launch.script import main_file, relaunch

__all__ = ["enable_multi_gpu", "launch"]

logger = log.get(__name__)


def enable_multi_gpu(num_gpus: int | None = None) -> None:
    """Run the script as one process per GPU from here on.

    A script started as a single process is relaunched from its beginning as that many ranks, and this call does not
    return in the process that made it; so call it first. In a rank, started by any launcher, it does nothing.
    `num_gpus` None: PANTHERAML_NPROC, else every visible GPU; with fewer than two the script continues as it is. On a
    host without GPUs the number is required. PANTHERAML_RELAUNCH=0 disables the relaunch.
    """
    log.start_for_scripts()
    if env.launched_rank() is not None:
        if env.was_relaunched():
            die_with_parent()
        return
    if env.was_relaunched():
        raise LaunchError(
            "This process was relaunched as a rank, but its rank is missing from the environment.",
            fix="Do not unset RANK, LOCAL_RANK and WORLD_SIZE.",
        )
    processes, reason = _process_count(num_gpus if num_gpus is not None else env.processes_requested())
    if processes == 1:
        logger.warning("multi-GPU is enabled, but the script continues as one process: %s", reason)
    elif not env.relaunch_allowed():
        logger.warning("%s, but the script continues as one process: PANTHERAML_RELAUNCH=0", reason)
    else:
        logger.info("relaunching as %d processes: %s", processes, reason)
        relaunch(processes)


def launch(function: Callable[..., Any], *arguments: Any, nproc: int | None = None) -> list[Any]:
    """Run `function(*arguments)` in `nproc` new processes, the ranks of one group, and return the result of each.

    Made for notebooks. A function of a module is imported in every process. One defined in the notebook exists nowhere
    else, so processes are forked, which is possible until CUDA is initialized. `nproc` None: one per visible GPU. If a
    rank fails, the others are terminated and a WorkerError names it.
    """
    if env.launched_rank() is not None:
        raise LaunchError("This process is already a rank.", fix="Call the function directly.")
    # imported here: a script that only relaunches itself need not wait for torch
    from pantheraml.rendezvous.elastic_agent import run_function

    processes, _ = _process_count(nproc)
    ended = run_function(function, arguments, processes=processes, start=_start_method(function, arguments))
    if ended.stopped_by is not None:
        raise InterruptedRunError(f"Stopped by {ended.stopped_by.name}; the {processes} processes were terminated.")
    if ended.failure is not None:
        error = WorkerError(str(ended.failure))
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
    if requested < 1:
        raise ConfigError(f"{requested} is not a valid number of processes.")
    if gpus and requested > gpus:
        raise DeviceError(
            f"{requested} processes were requested, but {gpus} GPU(s) are visible.", fix=f"Request {gpus} or fewer."
        )
    return requested, f"{requested} were requested"


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
