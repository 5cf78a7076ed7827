"""NCCL's flight recorder on a collective that its GPU has not started. One GPU is enough to delay it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pantheraml.engine.guard.watchdog import recorded_collectives
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


def newest_group(record: RankRecord) -> str:
    return record.collectives[-1].group


def test_flight_record_shows_the_pending_collective_only(group: None) -> None:
    values = torch.ones(8, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    before = recorded_collectives("nccl")
    torch.cuda._sleep(ABOUT_A_SECOND)  # type: ignore[no-untyped-call]
    dist.all_reduce(values)
    pending = recorded_collectives("nccl")
    torch.cuda.synchronize()
    after = recorded_collectives("nccl")

    assert before.current is None
    assert after.current is None
    assert pending.current is not None
    assert pending.current.name == "all_reduce"
    assert "default_pg" in pending.current.group
    last_started = before.begun(newest_group(before))
    assert last_started is not None
    assert pending.current.number == after.begun(newest_group(after)) == last_started + 1
