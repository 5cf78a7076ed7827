"""The vote of a relaunched script's ranks on their devices, before their first collective.

The rule is that of a run (`device_vote`): if a rank cannot use its GPU, all agree that rank 0 continues alone, or,
under `strict`, all stop with the same error. Rank 0 has used CUDA and knows itself as one of several by then, so its
script starts again from the beginning, as one process that sees no GPU but its own.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from pantheraml.base import env
from pantheraml.launch.script import continue_alone
from pantheraml.rendezvous import device_vote
from pantheraml.rendezvous.join_store import join_store

TIMEOUT_SECONDS = 300


class _Vote:
    """Whether the ranks of this process have voted: once, however many parts of a script ask for several GPUs."""

    over = False


def agree_on_gpus(place: env.ProcessRank, gpu: int, *, strict: bool, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Return if all ranks can use their GPU, this one GPU `gpu`; a collective, of ranks that a script relaunched.

    If rank 0 is to continue alone, this does not return: the other ranks exit with success.
    """
    if _Vote.over or dist.is_initialized():
        return
    _Vote.over = True
    store = join_store(place, env.store_address(), timeout_seconds=timeout_seconds)
    agreed = device_vote.agree_on_devices(
        store,
        place,
        device_vote.device_problem(torch.device("cuda", gpu)),
        strict=strict or env.fallback_forbidden(),
        timeout_seconds=timeout_seconds,
    )
    if agreed.fallback_reason is None:
        return
    if not agreed.takes_part:
        sys.exit(0)
    continue_alone(gpu, env.ScriptFallback(place.world_size, agreed.fallback_reason))
