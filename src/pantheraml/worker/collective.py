"""Task `collective`: test that the ranks of this host can rendezvous and exchange tensors. For `pantheraml doctor`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from pantheraml.base.errors import LaunchError
from pantheraml.base.event_stream import EventWriter
from pantheraml.base.folders import write_text
from pantheraml.parallel.process_group import World, open_world
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import CollectiveRequest, CollectiveResult

ELEMENTS = 4 << 20
"""16 MiB of float32: as large as a gradient bucket of DDP."""
ROUNDS = 3


def collective_task(folder: Path, events: EventWriter) -> None:
    request = CollectiveRequest.read(folder)
    plan = RunDir(request.run_dir).plan()
    with open_world(plan, timeout_seconds=request.timeout_seconds, max_retries=0) as world:
        seconds = all_reduce_seconds(world)
        if world.is_main:
            result = CollectiveResult(processes=world.size, backend=plan.backend, bytes=4 * ELEMENTS, seconds=seconds)
            write_text(folder / "collective.json", result.model_dump_json(indent=1))


def all_reduce_seconds(world: World) -> float:
    """All-reduce a tensor that differs by rank; return the shortest time, and raise if a sum is wrong. A collective."""
    expected = world.size * (world.size + 1) / 2
    times = []
    for _ in range(ROUNDS):
        mine = torch.full((ELEMENTS,), float(world.rank + 1), device=world.device)
        begin = time.perf_counter()
        try:
            dist.all_reduce(mine)
            wrong = int((mine != expected).sum())  # waits for the GPU
        except RuntimeError as err:  # DistError is one, too
            raise LaunchError(
                f"Rank {world.rank} of {world.size} could not all-reduce: {str(err).splitlines()[0]}.",
                fix="Rerun with NCCL_DEBUG=INFO and read worker.log; NCCL_P2P_DISABLE=1 shows whether GPUs fail to read"
                " each other's memory, NCCL_SOCKET_IFNAME=lo whether it is the network interface.",
            ) from err
        times.append(time.perf_counter() - begin)
        if wrong:
            raise LaunchError(
                f"Rank {world.rank} of {world.size} got a wrong sum in {wrong:,} of {ELEMENTS:,} elements.",
                fix="Do not train on several GPUs here. NCCL_P2P_DISABLE=1 often helps where an IOMMU is on (disable"
                " ACS in the firmware).",
            )
    return min(times)
