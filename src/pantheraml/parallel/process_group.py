"""The processes of a run: who this one is, which device it owns, and the process group they share."""

from __future__ import annotations

import datetime
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
from pantheraml.parallel.device_vote import agree_on_devices, device_problem
from pantheraml.parallel.layout import ALONE, Layout, make_layout
from pantheraml.parallel.one_node import interface_variables, loopback_interface
from pantheraml.parallel.rendezvous import interface_towards, meet
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.plan import Plan

# If a peer dies meanwhile, the elastic agent ends the others at once; this bounds only waiting for live ones.
PATIENCE = datetime.timedelta(hours=6)


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device
    patient_group: dist.ProcessGroup | None = None
    """A gloo group with a long timeout, for waiting on files; None in a run of one process."""
    layout: Layout = ALONE
    """How the processes divide the work."""
    fallback_reason: str | None = None
    """Why this process goes on alone although there were others."""
    copies_on: tuple[int, ...] = ()
    """GPUs of this one process that each get a copy of the model for every batch, `device` first; empty: no copies."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, values: list[float]) -> torch.Tensor:
        """Every rank's `values` as a [size, len(values)] float64 tensor on the CPU: one small collective."""
        mine = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return mine.unsqueeze(0)
        if self.device.type == "cuda" and dist.get_backend() == "nccl":
            mine = mine.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        return torch.stack(rows).cpu()

    def rows(self, values: list[float]) -> list[list[float]]:
        """Every rank's `values`, as plain numbers; a process that is alone has them already."""
        return [values] if self.size == 1 else list(map(list, self.gather(values).tolist()))

    def wait_for_main(self) -> None:
        """Meet the other ranks after work that may take rank 0, or the slowest disk, longer than a step's timeout."""
        if self.size > 1:
            dist.barrier(group=self.patient_group)


def joined_world(device: torch.device) -> World:
    """This process among those of a group that somebody else has set up, each with a copy of the model; alone if there
    is none. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World(rank=0, size=1, device=device)
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, layout=make_layout(ParallelDims(replicate=size), device.type))


def _interface(place: env.ProcessRank, address: env.StoreAddress) -> dict[str, str]:
    """The variables by which gloo and NCCL listen on one network interface alone: loopback if all ranks are here."""
    here = address.file is not None or place.local_world_size == place.world_size
    return interface_variables(loopback_interface() if here else interface_towards(address))


class NotNeededError(Exception):
    """All ranks agreed to go on without this process; it should end, and it has done nothing wrong."""


@contextmanager
def open_world(
    plan: Plan,
    *,
    timeout_seconds: float,
    collective_seconds: float | None = None,
    max_retries: int = 3,
    strict: bool = True,
) -> Iterator[World]:
    """Join the other ranks (if there are any) for the length of a `with` block.

    A rank that does not come is a LaunchError that names it, after `timeout_seconds`; see `rendezvous.meet`. That is
    also how long collectives may take, unless `collective_seconds` says something else. A device
    that is not usable is a DeviceError on all ranks, or, unless the run is `strict` or its model divided, the end of
    all but rank 0; see `device_vote`.
    """
    place = env.process_rank()
    if place.world_size != plan.world_size:
        raise LaunchError(
            f"The plan is for {plan.world_size} process(es), but {place.world_size} were started.",
            todo="Start the run with `pantheraml train`.",
        )
    device = torch.device("cpu")
    if plan.device == "cuda":
        # `verify` may put several processes on one GPU; another machine may have more than the plan's
        device = torch.device("cuda", place.local_rank % max(1, torch.cuda.device_count()))
    torch.set_num_threads(plan.threads_per_process)
    reason = None
    if place.world_size > 1:
        address = env.store_address()
        store = meet(place, address, timeout_seconds=timeout_seconds, max_retries=max_retries)
        for name, value in _interface(place, address).items():
            env.suggest_for_this_process(name, value)
        divided = plan.dims.world_size > plan.dims.replicate
        agreed = agree_on_devices(
            store, place, device_problem(device), strict=strict or divided, timeout_seconds=timeout_seconds
        )
        if not agreed.takes_part:
            raise NotNeededError
        reason = agreed.fallback_reason
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world_size == 1 or reason is not None:
        copies_on = tuple(range(len(plan.device_ids))) if plan.copies else ()
        yield World(rank=0, size=1, device=device, fallback_reason=reason, copies_on=copies_on)
        return
    collective_timeout = datetime.timedelta(seconds=collective_seconds or timeout_seconds)
    try:
        dist.init_process_group(
            backend=plan.backend,
            store=store.raw,
            rank=place.rank,
            world_size=place.world_size,
            timeout=collective_timeout,
            device_id=device if plan.backend == "nccl" else None,
        )
        patient_group = dist.new_group(backend="gloo", timeout=PATIENCE)
        layout = make_layout(plan.dims, device.type, timeout=collective_timeout)
    except (dist.DistError, RuntimeError, ValueError) as err:
        raise LaunchError(
            f"The {place.world_size} processes could not connect to each other: {err}",
            todo="See worker.log, and raise parallel.timeout_seconds if some are slow.",
        ) from err
    try:
        yield World(place.rank, place.world_size, device, patient_group, layout)
    finally:
        # A DDP wrapper that is still about would be the last owner of the group, and end gloo's threads while it holds
        # the interpreter's lock, for which one of them may be waiting.
        gc.collect()
        dist.destroy_process_group()
