"""The processes of a run: who this one is, which device it owns, and the process group they share."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
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

    def wait_for_main(self) -> None:
        """Meet the other ranks after work that may take rank 0, or the slowest disk, longer than a step's timeout."""
        if self.size > 1:
            dist.barrier(group=self.patient_group)


@contextmanager
def open_world(plan: Plan, *, timeout_seconds: int) -> Iterator[World]:
    """Join the other ranks (if there are any) for the length of a `with` block."""
    place = env.process_rank()
    if place.world_size != plan.world_size:
        raise LaunchError(
            f"The plan is for {plan.world_size} process(es), but {place.world_size} were started.",
            todo="Start the run with `pantheraml train`.",
        )
    device = torch.device("cpu")
    if plan.device == "cuda":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    torch.set_num_threads(plan.threads_per_process)
    if place.world_size == 1:
        yield World(rank=0, size=1, device=device)
        return
    try:
        dist.init_process_group(
            backend=plan.backend,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            device_id=device if plan.backend == "nccl" else None,
        )
        patient_group = dist.new_group(backend="gloo", timeout=PATIENCE)
    except (dist.DistError, RuntimeError, ValueError) as err:
        raise LaunchError(
            f"The {place.world_size} processes could not meet: {err}",
            todo="Check that all of them started (worker.log) and raise parallel.timeout_seconds if they are slow.",
        ) from err
    try:
        yield World(rank=place.rank, size=place.world_size, device=device, patient_group=patient_group)
    finally:
        dist.destroy_process_group()
