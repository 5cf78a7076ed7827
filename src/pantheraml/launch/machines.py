"""One machine of several: `pantheraml train` on each of them starts its own processes, and all of those are one run.

The process is replaced by the agent of this machine, which meets the agents of the others and then runs the very same
command line once per rank; from there on it is a run whose ranks somebody else has started.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.launch.script import python_module
from pantheraml.specs.plan import DeviceSpec
from pantheraml.specs.train import TrainConfig


@dataclass(frozen=True)
class Machine:
    """This machine among `count`, which meet on the first."""

    count: int
    number: int
    host: str
    port: int

    @classmethod
    def from_options(cls, nnodes: int, node_rank: int | None, rdzv: str | None) -> Machine:
        if nnodes < 2:
            raise ConfigError(f"--nnodes {nnodes} is one machine.", todo="Leave --nnodes out.")
        if node_rank is None or not 0 <= node_rank < nnodes:
            raise ConfigError(
                f"--nnodes {nnodes} needs --node-rank with another number from 0 to {nnodes - 1} on each machine."
            )
        host, colon, port = (rdzv or "").rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ConfigError(
                f"--nnodes {nnodes} needs --rdzv HOST:PORT, an address of machine 0 and a free port on it.",
                todo="For example: --rdzv 10.0.0.1:29500, the same on every machine.",
            )
        return cls(nnodes, node_rank, host.strip("[]"), int(port))


@dataclass(frozen=True)
class Assignment:
    """What the agent of a machine has to know; the rest is in the command that it runs."""

    machine: Machine
    processes: int
    run: str
    """The run folder, which all machines share."""
    timeout_seconds: int
    max_retries: int
    restart_on: tuple[str, ...]
    grace_seconds: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        values = json.loads(text)
        return cls(**{**values, "machine": Machine(**values["machine"]), "restart_on": tuple(values["restart_on"])})


def processes_here(config: TrainConfig, devices: DeviceSpec, asked: int | None) -> int:
    """How many this machine starts: as many as asked for, else one per GPU that is used, else one."""
    if asked is not None:
        return asked
    if config.device == "cpu" or not devices.gpus:
        return 1
    return len(config.parallel.device_ids or devices.gpus)


def become_agent(machine: Machine, processes: int, config: TrainConfig, output: Path) -> NoReturn:
    """Run this command line again, as each of the `processes` ranks of this machine."""
    sys.stdout.flush()
    sys.stderr.flush()
    parallel = config.parallel
    assignment = Assignment(
        machine=machine,
        processes=processes,
        run=str(output.resolve()),
        timeout_seconds=parallel.timeout_seconds,
        max_retries=parallel.max_retries,
        restart_on=parallel.restart_on,
        grace_seconds=parallel.grace_seconds,
    )
    agent = [*python_module("pantheraml.worker.machine"), assignment.to_json()]
    os.execve(
        agent[0],
        [*agent, sys.executable, *sys.orig_argv[1:]],
        env.child_environment(PANTHERAML_RELAUNCHED="1", PANTHERAML_RESTARTED=None),
    )
