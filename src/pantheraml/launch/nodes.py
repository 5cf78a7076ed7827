"""Multi-node runs: `pantheraml train` on each node starts that node's ranks, and all of them form one run.

The process is replaced by the node's agent, which joins the rendezvous with the agents of the other nodes and then runs
the same command line once per rank. From there on it is like a run whose ranks torchrun has started.
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
class NodeSpec:
    """This node among `count`; the rendezvous is on node 0."""

    count: int
    number: int
    host: str
    port: int

    @classmethod
    def from_options(cls, nnodes: int, node_rank: int | None, rdzv: str | None) -> NodeSpec:
        if nnodes < 2:
            raise ConfigError(f"--nnodes {nnodes} is not a multi-node run.", fix="Remove --nnodes.")
        if node_rank is None or not 0 <= node_rank < nnodes:
            raise ConfigError(
                f"--nnodes {nnodes} needs --node-rank, a different number from 0 to {nnodes - 1} on each node.",
                fix="Add --node-rank 0 on the node of --rdzv, 1 on the next, and so on.",
            )
        host, colon, port = (rdzv or "").rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ConfigError(
                f"--nnodes {nnodes} needs --rdzv HOST:PORT, an address of node 0 and a free port on it.",
                fix="For example: --rdzv 10.0.0.1:29500, the same on every node.",
            )
        return cls(nnodes, node_rank, host.strip("[]"), int(port))


@dataclass(frozen=True)
class Assignment:
    """Arguments of a node's agent; everything else is in the command that it runs."""

    node: NodeSpec
    processes: int
    run: str
    """The run folder, shared by all nodes."""
    timeout_seconds: int
    max_retries: int
    restart_on: tuple[str, ...]
    grace_seconds: int

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Assignment:
        values = json.loads(text)
        return cls(**{**values, "node": NodeSpec(**values["node"]), "restart_on": tuple(values["restart_on"])})


def processes_here(config: TrainConfig, devices: DeviceSpec, requested: int | None) -> int:
    """Number of ranks on this node: as requested, else one per GPU in use, else one."""
    if requested is not None:
        return requested
    if config.device == "cpu" or not devices.gpus:
        return 1
    return len(config.parallel.device_ids or devices.gpus)


def become_agent(node: NodeSpec, processes: int, config: TrainConfig, output: Path) -> NoReturn:
    """Replace this process by the node's agent, which runs this command line again as each of `processes` ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    parallel = config.parallel
    assignment = Assignment(
        node=node,
        processes=processes,
        run=str(output.resolve()),
        timeout_seconds=parallel.timeout_seconds,
        max_retries=parallel.max_retries,
        restart_on=parallel.restart_on,
        grace_seconds=parallel.grace_seconds,
    )
    agent = [*python_module("pantheraml.worker.entry"), "node", assignment.to_json()]
    os.execve(
        agent[0],
        [*agent, sys.executable, *sys.orig_argv[1:]],
        env.child_environment(PANTHERAML_RELAUNCHED="1", PANTHERAML_RESTARTED=None),
    )
