"""Several GPUs for people's own scripts and notebooks: one process per GPU, without a launcher on the command line.

A script calls `enable_multi_gpu()` (or passes `enable_multi_gpu=True` to `FastLanguageModel.from_pretrained`, or is
started with PANTHERAML_ENABLE_MULTIGPU=1) and is started again as one rank per GPU. A notebook, which cannot be started
again, calls `launch(function)`.
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
    """From here on the script runs as one process per GPU.

    A script that was started alone is started again from its beginning as that many ranks, and this call does not
    return in the process that made it; so call it first. In a rank, whoever started it, it does nothing. `num_gpus`
    None: PANTHERAML_NPROC, else every visible GPU; with fewer than two the script goes on as it is. On a machine
    without GPUs the number must be given. PANTHERAML_RELAUNCH=0 forbids the new start.
    """
    if env.launched_rank() is not None:
        if env.was_relaunched():
            die_with_parent()
        return
    if env.was_relaunched():
        raise LaunchError(
            "This process was started again as a rank, but its rank is not in the environment any more.",
            todo="Leave RANK, LOCAL_RANK and WORLD_SIZE as they are.",
        )
    processes, reason = _processes(num_gpus if num_gpus is not None else env.processes_requested())
    if processes == 1:
        logger.warning("several GPUs are switched on, but the script goes on as one process: %s", reason)
    elif not env.relaunch_allowed():
        logger.warning("%s, but the script goes on as one process: PANTHERAML_RELAUNCH=0", reason)
    else:
        logger.info("starting again as %d processes: %s", processes, reason)
        relaunch(processes)


def launch(function: Callable[..., Any], *arguments: Any, nproc: int | None = None) -> list[Any]:
    """Run `function(*arguments)` in `nproc` new processes that are ranks of each other, and return what each returned.

    Made for notebooks. A function of a module is imported afresh in every process. One that was written in the notebook
    exists nowhere else, so processes are forked, which is possible until the GPU was used for the first time.
    `nproc` None: one per visible GPU. If a rank fails, the others are ended, and a WorkerError names it.
    """
    if env.launched_rank() is not None:
        raise LaunchError("This process is a rank already.", todo="Call the function itself.")
    # not above: a script that only starts itself again need not wait for torch
    from pantheraml.parallel.agent import run_function

    processes, _ = _processes(nproc)
    ended = run_function(function, arguments, processes=processes, start=_start_method(function, arguments))
    if ended.stopped_by is not None:
        raise InterruptedRunError(f"Stopped by {ended.stopped_by.name}; the {processes} processes were ended.")
    if ended.failure is not None:
        error = WorkerError(str(ended.failure))
        if ended.failure.traceback is not None:
            error.add_note(ended.failure.traceback)
        raise error
    return [ended.values[rank] for rank in range(processes)]


def _processes(asked: int | None) -> tuple[int, str]:
    """How many, and why."""
    devices = probe()
    gpus = len(devices.gpus)
    if asked is None:
        return max(1, gpus), f"{gpus} GPUs are visible" if gpus else devices.note or "no GPU is visible"
    if asked < 1:
        raise ConfigError(f"{asked} is not a number of processes.")
    if gpus and asked > gpus:
        raise DeviceError(
            f"{asked} processes were asked for, but {gpus} GPU(s) are visible.", todo=f"Ask for {gpus} or less."
        )
    return asked, f"{asked} were asked for"


def _start_method(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Literal["spawn", "fork"]:
    import torch

    name = getattr(function, "__qualname__", repr(function))
    # Code from standard input claims to be from a file "<stdin>", which a spawned process would look for.
    from_stdin = getattr(sys.modules["__main__"], "__file__", None) is not None
    if main_file() is None and (from_stdin or function.__module__ == "__main__"):
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise LaunchError(
                f"{name} exists in this session only, and the GPU is in use here already: no process can inherit both.",
                todo="Restart the session and call launch first, or put the function into a module and import it.",
            )
        return "fork"
    try:
        pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as err:
        raise LaunchError(
            f"{name} and its arguments cannot be sent to other processes: {err}.",
            todo="Use a function at the top of a module, and arguments that can be pickled (names, paths, numbers).",
        ) from err
    return "spawn"
