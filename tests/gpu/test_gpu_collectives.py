"""What NCCL's flight recorder says of a collective that its GPU has not come to. One GPU is enough to hold it up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pantheraml.engine.guard.collectives import recorded_collectives
from pantheraml.launch.flight_record import RankRecord

ABOUT_A_SECOND = 2_000_000_000
"""In cycles of the GPU's clock."""


@pytest.fixture
def group() -> Iterator[None]:
    device = torch.device("cuda", 0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def newest_group(found: RankRecord) -> str:
    return found.collectives[-1].group


def test_a_collective_that_waits_is_told_of_and_one_that_is_done_is_not(group: None) -> None:
    values = torch.ones(8, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    before = recorded_collectives("nccl")
    torch.cuda._sleep(ABOUT_A_SECOND)  # type: ignore[no-untyped-call]
    dist.all_reduce(values)
    held_up = recorded_collectives("nccl")
    torch.cuda.synchronize()
    after = recorded_collectives("nccl")

    assert before.current is None
    assert after.current is None
    assert held_up.current is not None
    assert held_up.current.name == "all_reduce"
    assert "default_pg" in held_up.current.group
    begun = before.begun(newest_group(before))
    assert begun is not None
    assert held_up.current.number == after.begun(newest_group(after)) == begun + 1
