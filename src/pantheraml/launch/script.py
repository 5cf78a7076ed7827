"""A plain `python script.py` that is to use several GPUs starts itself again, once, as several ranks.

The process is replaced by the elastic agent, which runs the very same command line once per rank: the process id stays,
GPU memory that it held is free, Ctrl-C goes to the agent and from there to every rank once, and the exit code is that
of the rank that failed first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal, NoReturn

import psutil

from pantheraml.base import env
from pantheraml.base.errors import LaunchError

Store = Literal["file", "loopback"]
"""Where the ranks of one node meet: in a file that only this user can reach, or, for scripts that join by `env://`, at
a port of the loopback interface."""


def python_module(name: str) -> list[str]:
    """A module of ours, run by this Python. -P: the current folder, which may be a model that somebody else has made,
    is no place to import from."""
    return [sys.executable, "-P", "-m", name]


def agent_command(processes: int, command: list[str], *, store: Store = "file") -> list[str]:
    """`command` as `processes` ranks on this machine."""
    return [*python_module("pantheraml.worker.agent"), str(processes), store, *command]


def relaunch(processes: int) -> NoReturn:
    """Become the agent of `processes` ranks that run this command line from its beginning."""
    reason = _why_not()
    if reason is not None:
        raise LaunchError(
            f"The script cannot start itself again as {processes} processes: {reason}.",
            todo=f"Call pantheraml.multigpu.launch(function, nproc={processes}), or put the code into a file and run"
            f" `torchrun --nproc-per-node {processes} FILE`.",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    command = agent_command(processes, [sys.executable, *sys.orig_argv[1:]], store="loopback")
    os.execve(command[0], command, _rank_environment(processes))


def main_file() -> Path | None:
    """The file that this program was started from; None in a notebook, and for code from -c or standard input."""
    name = getattr(sys.modules["__main__"], "__file__", None)
    return Path(name) if name is not None and Path(name).is_file() else None


def _why_not() -> str | None:
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return "this is an interactive session"
    if main_file() is None and "-c" not in sys.orig_argv:
        return "it was not started from a file"
    return None


def _rank_environment(processes: int) -> dict[str, str]:
    environment = env.child_environment(PANTHERAML_RELAUNCHED="1")
    cores = len(psutil.Process().cpu_affinity())
    return {"OMP_NUM_THREADS": str(max(1, cores // processes)), **environment}
