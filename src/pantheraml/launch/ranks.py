"""The command line as one rank of torchrun, accelerate or srun, which launches no ranks of its own.

Rank 0 runs as usual, except that its only worker is rank 0. Other ranks replace themselves by their worker at once and
join the rendezvous; rank 0 signals there when the data is ready in the run folder, which all ranks name.
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


def own_rank(parallel: MultiGPUConfig) -> env.ProcessRank | None:
    """Rank of this process, from its launcher or its config; None: single process."""
    launched = env.launched_rank()
    if parallel.rank is None or parallel.local_rank is None or parallel.world_size is None:
        return launched
    if launched is not None:
        if (launched.rank, launched.local_rank) != (parallel.rank, parallel.local_rank):
            raise ConfigError(
                f"parallel.rank={parallel.rank} and local_rank={parallel.local_rank} are set, but the launcher"
                f" made this process rank {launched.rank}, local rank {launched.local_rank}.",
                fix="Remove parallel.rank and parallel.local_rank.",
            )
        return launched
    if parallel.world_size == 1:
        return None
    return env.ProcessRank(parallel.rank, parallel.local_rank, parallel.world_size)


def with_world_size(config: TrainConfig, process: env.ProcessRank) -> TrainConfig:
    """Return `config` with the launcher's world size, and without this process's rank: it is the same on all ranks."""
    requested = config.parallel.world_size
    if requested not in (None, process.world_size):
        raise ConfigError(
            f"{requested} processes were requested (parallel.world_size, or --nproc), but the launcher started"
            f" {process.world_size}.",
            fix="Remove that setting, or launch that many processes.",
        )
    parallel = dataclasses.replace(config.parallel, world_size=process.world_size, rank=None, local_rank=None)
    return config.model_copy(update={"parallel": parallel})


def config_fingerprint(config: TrainConfig) -> str:
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def join_command(output: Path, config: TrainConfig) -> list[str]:
    """Command of this rank's worker, which joins the rendezvous before anything else."""
    return [
        *(*python_module("pantheraml.worker.entry"), "join", str(output)),
        f"--timeout-seconds={config.parallel.timeout_seconds}",
        f"--max-retries={config.parallel.max_retries}",
        f"--config-fingerprint={config_fingerprint(config)}",
    ]


def rank_environment(plan: Plan, config: TrainConfig, process: env.ProcessRank) -> dict[str, str]:
    return worker_environment(plan, grace_seconds=config.parallel.grace_seconds) | env.rank_variables(process)


def become_worker(output: Path, config: TrainConfig, plan: Plan, process: env.ProcessRank) -> NoReturn:
    """Replace this process by its worker, so that signals of the launcher reach it. For ranks other than 0."""
    command = join_command(output, config)
    os.execve(command[0], command, rank_environment(plan, config, process))
