"""Set up the process group: this process's rank, world size, device and mesh layout."""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
from pantheraml.parallel.layout import ALONE, Layout, make_layout
from pantheraml.rendezvous.device_vote import agree_on_devices, device_problem
from pantheraml.rendezvous.join_store import interface_towards, join_store
from pantheraml.rendezvous.one_node import interface_variables, loopback_interface
from pantheraml.rendezvous.sealed_store import SealedStore
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan

# If a rank dies, the process above the ranks ends the others at once; this only bounds waiting for live ranks.
LONG_TIMEOUT = datetime.timedelta(hours=6)


@dataclass(frozen=True)
class World:
    """Rank, world size, device and layout of this process."""

    rank: int
    size: int
    device: torch.device
    long_timeout_group: dist.ProcessGroup | None = None
    """A gloo group with a long timeout, for waiting on file I/O; None in a single-process run."""
    layout: Layout = ALONE
    fallback_reason: str | None = None
    """Why this process continues alone although a larger world was launched."""
    replica_devices: tuple[int, ...] = ()
    """GPUs for `nn.DataParallel` replicas in this process, `device` first; empty: none."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """All-gather `values` as a [size, len(values)] float64 tensor on the CPU."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return mine.unsqueeze(0)
        if self.device.type == "cuda" and dist.get_backend() == "nccl":
            mine = mine.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def rows(self, values: list[float]) -> list[list[float]]:
        """All-gather `values` as plain numbers; no collective in a world of one."""
        return [values] if self.size == 1 else list(map(list, self.gather(values).tolist()))

    def wait_for_main(self) -> None:
        """Barrier after work on rank 0 or slow disks that may exceed the collective timeout."""
        if self.size > 1:
            dist.barrier(group=self.long_timeout_group)


def world_from_process_group(device: torch.device) -> World:
    """Return a data-parallel World for a process group that was initialized elsewhere; world size 1 if there is none.

    Collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(rank=0, size=1, device=device)
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, layout=make_layout(ParallelDims(replicate=size), device.type))


def _interface(place: env.ProcessRank, address: env.StoreAddress) -> dict[str, str]:
    """Return variables that bind gloo and NCCL to one network interface; loopback if all ranks are on this node."""
    single_node = address.file is not None or place.local_world_size == place.world_size
    return interface_variables(loopback_interface() if single_node else interface_towards(address))


def join_process_group(
    place: env.ProcessRank, device: torch.device, backend: str, *, timeout_seconds: float, max_retries: int
) -> None:
    """Initialize the process group of a script's ranks, which torchrun, Slurm or the user started. A collective.

    Like `open_world`: LaunchError names missing ranks, and an unusable device raises DeviceError on all ranks.
    """
    store = _rendezvous(place, timeout_seconds=timeout_seconds, max_retries=max_retries)
    agree_on_devices(store, place, device_problem(device), strict=True, timeout_seconds=timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _initialize(place, store, device, backend, datetime.timedelta(seconds=timeout_seconds))


def _rendezvous(place: env.ProcessRank, *, timeout_seconds: float, max_retries: int) -> SealedStore:
    """Wait for all ranks, and bind gloo and NCCL to the network interface that connects them."""
    address = env.store_address()
    store = join_store(place, address, timeout_seconds=timeout_seconds, max_retries=max_retries)
    for name, value in _interface(place, address).items():
        env.set_default_for_this_process(name, value)
    return store


def _initialize(
    place: env.ProcessRank, store: SealedStore, device: torch.device, backend: str | None, timeout: datetime.timedelta
) -> None:
    dist.init_process_group(
        backend=backend,
        store=store.raw,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )


def _limit_memory(plan: Plan, device: torch.device) -> None:
    """Let torch use `plan.memory_fraction` of each GPU of this process; more is an out-of-memory error."""
    if plan.memory_fraction is None:
        return
    several = plan.copies or (plan.split is not None and plan.split.over_several)
    for each in range(len(plan.device_ids)) if several else (device,):
        torch.cuda.set_per_process_memory_fraction(plan.memory_fraction, each)


_left: list[dist.ProcessGroup | None] = []
"""Groups left by this process."""


def leave_group() -> None:
    """Destroy the process group, also while a script still holds a DDP wrapper.

    The wrapper would be the group's last owner, and deleting it would join gloo's threads with the GIL held, for which
    one of them may be waiting to drop the tensors of the last collective: a deadlock. So the group lives on, idle, and
    its threads get the GIL now.
    """
    gc.collect()
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()
    time.sleep(0.02)


class NotNeededError(Exception):
    """All ranks agreed to continue without this process; it should exit with success."""


@contextmanager
def open_world(
    plan: Plan,
    *,
    timeout_seconds: float,
    collective_seconds: float | None = None,
    max_retries: int = 3,
    strict: bool = True,
) -> Iterator[World]:
    """Initialize the process group (if there is more than one rank) for the duration of a `with` block.

    Raises LaunchError naming ranks that do not join within `timeout_seconds`; see `rendezvous.join_store`. It is
    also the collective timeout unless `collective_seconds` is given. An unusable device raises DeviceError on all
    ranks, or, if the run is neither `strict` nor model parallel, ends all ranks but rank 0; see `device_vote`.
    """
    place = env.process_rank()
    if place.world_size != plan.world_size:
        raise LaunchError(
            f"The plan is for {plan.world_size} process(es), but {place.world_size} were started.",
            fix="Start the run with `pantheraml train`.",
        )
    device = torch.device("cpu")
    if plan.device == "cuda":
        # `verify` may put several ranks on one GPU, and another node may have more GPUs than planned
        device = torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))
    torch.set_num_threads(plan.threads_per_process)
    reason = None
    if place.world_size > 1:
        store = _rendezvous(place, timeout_seconds=timeout_seconds, max_retries=max_retries)
        model_parallel = plan.dims.world_size > plan.dims.replicate
        agreed = agree_on_devices(
            store, place, device_problem(device), strict=strict or model_parallel, timeout_seconds=timeout_seconds
        )
        if not agreed.takes_part:
            raise NotNeededError
        reason = agreed.fallback_reason
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _limit_memory(plan, device)
    if place.world_size == 1 or reason is not None:
        replica_devices = tuple(range(len(plan.device_ids))) if plan.copies else ()
        yield World(rank=0, size=1, device=device, fallback_reason=reason, replica_devices=replica_devices)
        return
    collective_timeout = datetime.timedelta(seconds=collective_seconds or timeout_seconds)
    try:
        _initialize(place, store, device, plan.backend, collective_timeout)
        long_timeout_group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
        layout = make_layout(plan.dims, device.type, timeout=collective_timeout)
    except (dist.DistError, RuntimeError, ValueError) as err:
        raise LaunchError(
            f"The {place.world_size} processes could not connect to each other: {err}",
            fix="See worker.log, and raise parallel.timeout_seconds if some ranks are slow.",
        ) from err
    try:
        yield World(place.rank, place.world_size, device, long_timeout_group, layout)
    finally:
        leave_group()
