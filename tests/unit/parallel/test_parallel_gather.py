from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pantheraml.parallel.gather import full_tensors, load_full, local_offsets, local_slice, shard_like
from pantheraml.parallel.layout import ALONE


@contextmanager
def as_rank(rank: int, shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """One rank in a fake process group, for code without communication."""
    world = int(torch.tensor(shape).prod())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor")[-len(shape) :])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_local_slices_tile_the_full_tensor(rows: int) -> None:
    whole = torch.arange(rows * 3).view(rows, 3)
    parts = []
    for rank in range(4):
        with as_rank(rank, (4,)) as mesh:
            like = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
            part = local_slice(whole, like)
            assert part.shape == like.to_local().shape
            parts.append(part)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(("rank", "rows"), [(0, [0, 1]), (1, [3, 4]), (2, [2]), (3, [5])])
def test_fsdp_shards_the_tensor_parallel_shard(rank: int, rows: list[int]) -> None:
    whole = torch.arange(6.0)
    with as_rank(rank, (2, 2)) as mesh:
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        part = torch.zeros(len(rows))
        like = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        assert local_slice(whole, like).tolist() == rows


def test_load_full_copies_the_local_slice() -> None:
    with as_rank(3, (2, 2)) as mesh:
        target = DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate(), Shard(0)], run_check=False)
        plain = torch.zeros(2)
        load_full([("w", target), ("b", plain)], {"w": torch.arange(12.0).view(4, 3), "b": torch.ones(2)})
        assert target.to_local().tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
        assert plain.tolist() == [1.0, 1.0]


def test_shard_like_matches_its_parameter_and_shares_memory() -> None:
    with as_rank(1, (2,)) as mesh:
        parameter = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)], src_data_rank=None)
        moment = torch.zeros(2, 3)
        spread = shard_like(moment, parameter)
        assert isinstance(spread, DTensor)
        assert spread.shape == parameter.shape
        assert spread.to_local().data_ptr() == moment.data_ptr()
        with pytest.raises(AssertionError, match="one value per"):
            shard_like(torch.zeros(3, 3), parameter)


def test_full_tensors_in_one_process() -> None:
    named = [("b", torch.ones(2)), ("a", torch.zeros(3, dtype=torch.bfloat16))]
    found = list(full_tensors(named, ALONE))
    assert [name for name, _ in found] == ["b", "a"]
    assert all(torch.equal(tensor, expected) for (_, tensor), (_, expected) in zip(found, named, strict=True))
    assert torch.equal(shard_like(named[0][1], torch.ones(2)), named[0][1])


def test_local_offsets() -> None:
    found = []
    for rank in range(4):
        with as_rank(rank, (2, 2)) as mesh:
            cut = distribute_tensor(torch.zeros(3, 2), mesh, [Replicate(), Shard(0)], src_data_rank=None)
            found.append(local_offsets(cut))
    assert found == [(0, 0), (2, 0), (0, 0), (2, 0)]
    assert local_offsets(torch.zeros(2, 3)) == (0, 0)
    assert local_offsets(torch.tensor(1.0)) == ()
