"""The command line as a rank: torchrun, accelerate or srun started it several times, and it launches nobody.

Rank 0 carries out the run as always, except that its only worker is itself as a rank. The others turn into their worker
at once; there they meet rank 0, which tells them when the data is ready in the run folder that they all name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import NoReturn

from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.launch.local import worker_environment
from pantheraml.launch.script import python_module
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig


def own_place(parallel: MultiGPUConfig) -> env.ProcessRank | None:
    """Which rank this process is, as its launcher or its own configuration says; None: it is alone."""
    launched = env.launched_rank()
    if parallel.rank is None or parallel.local_rank is None or parallel.world_size is None:
        return launched
    if launched is not None:
        if (launched.rank, launched.local_rank) != (parallel.rank, parallel.local_rank):
            raise ConfigError(
                f"parallel.rank={parallel.rank} and local_rank={parallel.local_rank} were asked for, but the launcher"
                f" made this process rank {launched.rank}, local rank {launched.local_rank}.",
                todo="Leave parallel.rank and parallel.local_rank out.",
            )
        return launched
    if parallel.world_size == 1:
        return None
    return env.ProcessRank(parallel.rank, parallel.local_rank, parallel.world_size)


def with_world_size(config: TrainConfig, place: env.ProcessRank) -> TrainConfig:
    """The launcher has decided how many processes there are; who this one is, is not for the others to know."""
    asked = config.parallel.world_size
    if asked not in (None, place.world_size):
        raise ConfigError(
            f"{asked} processes were asked for (parallel.world_size, or --nproc), but the launcher started"
            f" {place.world_size}.",
            todo="Leave that setting out, or start as many.",
        )
    parallel = dataclasses.replace(config.parallel, world_size=place.world_size, rank=None, local_rank=None)
    return config.model_copy(update={"parallel": parallel})


def config_fingerprint(config: TrainConfig) -> str:
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def join_command(output: Path, config: TrainConfig) -> list[str]:
    """This process's worker, which meets its peers before it does anything else."""
    return [
        *(*python_module("pantheraml.worker.join"), str(output)),
        f"--timeout-seconds={config.parallel.timeout_seconds}",
        f"--max-retries={config.parallel.max_retries}",
        f"--config-fingerprint={config_fingerprint(config)}",
    ]


def rank_environment(plan: Plan, config: TrainConfig, place: env.ProcessRank) -> dict[str, str]:
    return worker_environment(plan, grace_seconds=config.parallel.grace_seconds) | env.rank_variables(place)


def become_worker(output: Path, config: TrainConfig, plan: Plan, place: env.ProcessRank) -> NoReturn:
    """For ranks other than 0, which have nothing to show: signals of the launcher then reach the worker itself."""
    command = join_command(output, config)
    os.execve(command[0], command, rank_environment(plan, config, place))
