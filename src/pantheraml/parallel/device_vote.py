"""Before the first collective all ranks tell whether they can use their device, and decide together what follows.

One rank that quietly went on with another device, or left, would leave its peers waiting. So each posts its answer on
the store, all read the same answers, and all come to the same end: everyone goes on, everyone stops with the same
error, or, if the run may fall back, rank 0 goes on alone and the others leave in order.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import DeviceError, LaunchError
from pantheraml.parallel.sealed import SealedStore

_WELL = "ok"


@dataclass(frozen=True)
class Agreement:
    """What the ranks decided."""

    world_size: int
    """How many processes go on: all, or one."""
    takes_part: bool
    """Whether this process is among them; if not, it should end with success and say nothing."""
    fallback_reason: str | None
    """Why one process goes on instead of all; to be warned about and recorded. None: all go on."""


def device_problem(device: torch.device) -> str | None:
    """Why this process cannot use `device`; None: it can."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError) as err:  # a build of torch without CUDA asserts
        return str(err).splitlines()[0]
    return None


def agree_on_devices(
    store: SealedStore, place: ProcessRank, problem: str | None, *, strict: bool, timeout_seconds: float
) -> Agreement:
    """Called by every rank with its own `problem` (see `device_problem`) after `rendezvous.meet`.

    DeviceError, with the same text on all ranks, if some device is not usable and the run is `strict`, or if it is
    rank 0's own.
    """
    patience = datetime.timedelta(seconds=timeout_seconds)
    store.set(f"device/{place.rank}", problem or _WELL)
    names = [f"device/{rank}" for rank in range(place.world_size)]
    try:
        store.wait(names, patience)
        answers = [store.get(name).decode() for name in names]
        _leave_together(store, place, patience)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise LaunchError(
            f"Not all {place.world_size} processes said within {timeout_seconds:g} s whether their device is usable.",
            todo="See their logs, and raise parallel.timeout_seconds if they are slow.",
        ) from err
    bad = {rank: answer for rank, answer in enumerate(answers) if answer != _WELL}
    if not bad:
        return Agreement(place.world_size, takes_part=True, fallback_reason=None)
    reason = "; ".join(f"rank {rank} cannot use its device: {answer}" for rank, answer in bad.items())
    if strict or 0 in bad:
        raise DeviceError(
            f"{len(bad)} of {place.world_size} processes have no usable device: {reason}.",
            todo="Check those devices, or leave them out (parallel.device_ids).",
        )
    return Agreement(1, takes_part=place.rank == 0, fallback_reason=reason)


def _leave_together(store: SealedStore, place: ProcessRank, patience: datetime.timedelta) -> None:
    """Whoever hosts the store may end after this; so everyone must have read it by then."""
    store.set(f"device/{place.rank}/read", _WELL)
    if place.rank == 0:
        store.wait([f"device/{rank}/read" for rank in range(place.world_size)], patience)
