"""Agree across ranks, before the first collective, on whether all devices are usable.

A rank that silently switched device or exited would leave its peers hanging. So each rank posts its status in the
store, all read the same statuses and reach the same decision: all continue, all raise the same error, or, if the run
may fall back, rank 0 continues alone and the others exit cleanly.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import DeviceError, LaunchError
from pantheraml.rendezvous.sealed_store import SealedStore

_WELL = "ok"


@dataclass(frozen=True)
class Agreement:
    """Decision of the ranks."""

    world_size: int
    """Number of ranks that continue: all, or one."""
    takes_part: bool
    """True if this rank continues; otherwise it should exit silently with success."""
    fallback_reason: str | None
    """Why only rank 0 continues; to be logged as a warning. None: all continue."""


def device_problem(device: torch.device) -> str | None:
    """Return why this process cannot use `device`, or None if it can."""
    try:
        torch.ones(1, device=device).add_(1).item()
    except (RuntimeError, AssertionError) as err:  # torch builds without CUDA raise AssertionError
        return str(err).splitlines()[0]
    return None


def agree_on_devices(
    store: SealedStore, place: ProcessRank, problem: str | None, *, strict: bool, timeout_seconds: float
) -> Agreement:
    """Exchange device status; every rank calls this with its own `device_problem` after `join_store`.

    Raises DeviceError, with the same text on all ranks, if a device is unusable and the run is `strict` or the device
    is rank 0's.
    """
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store.set(f"device/{place.rank}", problem or _WELL)
    names = [f"device/{rank}" for rank in range(place.world_size)]
    try:
        store.wait(names, timeout)
        answers = [store.get(name).decode() for name in names]
        _wait_for_readers(store, place, timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as err:
        raise LaunchError(
            f"Not all {place.world_size} ranks reported within {timeout_seconds:g} s whether their device is usable.",
            fix="Check the ranks' logs, and raise parallel.timeout_seconds if they are slow.",
        ) from err
    bad = {rank: answer for rank, answer in enumerate(answers) if answer != _WELL}
    if not bad:
        return Agreement(place.world_size, takes_part=True, fallback_reason=None)
    reason = "; ".join(f"rank {rank} cannot use its device: {answer}" for rank, answer in bad.items())
    if strict or 0 in bad:
        raise DeviceError(
            f"{len(bad)} of {place.world_size} ranks have no usable device: {reason}.",
            fix="Check those devices, or exclude them (parallel.device_ids).",
        )
    return Agreement(1, takes_part=place.rank == 0, fallback_reason=reason)


def _wait_for_readers(store: SealedStore, place: ProcessRank, timeout: datetime.timedelta) -> None:
    """Keep rank 0, which may host the store and exit next, until every rank has read the statuses."""
    store.set(f"device/{place.rank}/read", _WELL)
    if place.rank == 0:
        store.wait([f"device/{rank}/read" for rank in range(place.world_size)], timeout)
