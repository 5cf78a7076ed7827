"""Relaunch a plain `python script.py` once as several ranks, to use several GPUs.

The process is replaced by the elastic agent, which runs the same command line once per rank: the process ID stays, its
GPU memory is freed, Ctrl-C goes to the agent and from there to every rank once, and the exit code is that of the first
rank to fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import psutil

from pantheraml.base import env
from pantheraml.base.errors import LaunchError


def python_module(name: str) -> list[str]:
    """Command that runs one of our modules. -P: no imports from the working directory, such as a downloaded model."""
    return [sys.executable, "-P", "-m", name]


def ranks_command(processes: int, command: list[str]) -> list[str]:
    """Command that runs our worker `command` as `processes` ranks on this node."""
    return [*python_module("pantheraml.worker.entry"), "ranks", str(processes), *command]


def agent_command(processes: int, command: list[str]) -> list[str]:
    """Command of an elastic agent that runs a script, `command`, as `processes` ranks on this node."""
    return [*python_module("pantheraml.worker.entry"), "elastic", str(processes), *command]


def relaunch(processes: int) -> NoReturn:
    """Replace this process by an elastic agent whose `processes` ranks run this command line from the start."""
    reason = why_not_relaunch()
    if reason is not None:
        raise LaunchError(
            f"The script cannot relaunch itself as {processes} processes: {reason}.",
            fix=f"Call pantheraml.multigpu.launch(function, nproc={processes}), or put the code into a file and run"
            f" `torchrun --nproc-per-node {processes} FILE`.",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    command = agent_command(processes, [sys.executable, *sys.orig_argv[1:]])
    os.execve(command[0], command, _rank_environment(processes))


def continue_alone(gpu: int, fallback: env.ScriptFallback) -> NoReturn:
    """Replace this rank by its script, from the beginning, as one process that sees GPU `gpu` of those visible here."""
    sys.stdout.flush()
    sys.stderr.flush()
    visible = env.visible_cuda_devices()
    changes: dict[str, str | None] = {
        **env.outside_of_launch(),
        "PANTHERAML_RELAUNCH": "0",
        env.FALLBACK: f"{fallback.planned}:{fallback.reason}",
        "CUDA_VISIBLE_DEVICES": visible.split(",")[gpu].strip() if visible else str(gpu),
    }
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], env.child_environment(**changes))


def main_file() -> Path | None:
    """File of the main program; None in a notebook, and for code from -c or standard input."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(name) if name is not None and Path(name).is_file() else None


def why_not_relaunch() -> str | None:
    """Return why this process cannot be relaunched as several ranks; None: it can."""
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return "this is an interactive session"
    if main_file() is None and "-c" not in sys.orig_argv:
        return "it was not started from a file"
    return None


def _rank_environment(processes: int) -> dict[str, str]:
    environment = env.child_environment(PANTHERAML_RELAUNCHED="1")
    cores = len(psutil.Process().cpu_affinity())
    return {"OMP_NUM_THREADS": str(max(1, cores // processes)), **environment}
