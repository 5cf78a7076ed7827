from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pantheraml.engine.optim.adamw import LeanAdamW, MomentFormat
from pantheraml.parallel.local_shards import local_shards, local_squared_norm, move_gradients_to_shards, replica_count


@pytest.fixture
def one() -> Iterator[DeviceMesh]:
    """Real gloo collectives with world size 1."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def eight() -> Iterator[DeviceMesh]:
    """2 x 2 x 2 ranks in a fake process group, for code without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    finally:
        dist.destroy_process_group()


def test_unsharded_parameter_is_its_own_shard_and_keeps_its_gradient() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    named = [("w", parameter)]
    parts = local_shards(named)
    move_gradients_to_shards(named, parts)
    assert parts[0][1] is parameter
    assert parameter.grad is not None


def test_optimizer_step_on_the_shard_updates_the_parameter(one: DeviceMesh) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), one, [Shard(0)]))
    parameter.grad = DTensor.from_local(torch.full((3,), 2.0), one, [Shard(0)])
    named = [("w", parameter)]
    parts = local_shards(named)
    assert not isinstance(parts[0][1], DTensor)
    move_gradients_to_shards(named, parts)
    assert parameter.grad is None
    torch.optim.SGD([parts[0][1]], lr=0.25).step()
    assert parameter.full_tensor().tolist() == [0.5, 0.5, 0.5]


def test_partial_gradients_are_reduced(one: DeviceMesh) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(3), one, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.full((3,), 2.0), one, [Partial()])
    named = [("w", parameter)]
    parts = local_shards(named)
    move_gradients_to_shards(named, parts)
    assert parts[0][1].grad is not None
    assert parts[0][1].grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ([Replicate(), Replicate(), Replicate()], 8),
        ([Replicate(), Shard(0), Replicate()], 4),
        ([Replicate(), Shard(0), Shard(1)], 2),
        ([Shard(0), Shard(0), Shard(1)], 1),
    ],
)
def test_replica_count_follows_placements(eight: DeviceMesh, placements: list[Placement], expected: int) -> None:
    assert replica_count(DTensor.from_local(torch.ones(2, 2), eight, placements, run_check=False), 8) == expected


def test_replica_count_includes_ranks_outside_the_mesh(eight: DeviceMesh) -> None:
    spread = DTensor.from_local(torch.ones(2, 2), eight["shard"], [Shard(0)], run_check=False)
    assert replica_count(spread, 8) == 4
    assert replica_count(torch.ones(2), 8) == 8


def test_squared_norm_is_divided_by_replicas_for_any_dtype(eight: DeviceMesh) -> None:
    # four equal values each, so that the norm, twice the value, is exact in any dtype
    values = {torch.float64: 1.0 + 2**-40, torch.float32: 3.0, torch.bfloat16: 0.5}
    parameters = [(str(dtype), nn.Parameter(torch.ones(4, dtype=dtype))) for dtype in values]
    for _, parameter in parameters:
        parameter.grad = torch.full_like(parameter, values[parameter.dtype])
    spread = nn.Parameter(DTensor.from_local(torch.ones(4), eight["shard"], [Shard(0)], run_check=False))
    parameters += [("spread", spread), ("none", nn.Parameter(torch.ones(4)))]
    parts = local_shards(parameters)
    parts[3][1].grad = torch.full((4,), 2.0)
    found = local_squared_norm(parameters, parts, ranks=8)
    assert found.dtype == torch.float64
    own = 4 * ((1.0 + 2**-40) ** 2 + 9.0 + 0.25)
    assert float(found) == pytest.approx(own / 8 + 16.0 / 4, rel=1e-15)


def test_squared_norm_of_nothing_is_zero() -> None:
    empty = nn.Parameter(torch.ones(0, 4))
    empty.grad = torch.ones(0, 4)
    assert float(local_squared_norm([("w", empty)], [("w", empty)], ranks=2)) == 0
    assert float(local_squared_norm([], [], ranks=2)) == 0


def test_large_gradients_do_not_overflow_their_squares() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.tensor([1e30])
    assert float(local_squared_norm([("w", parameter)], [("w", parameter)], ranks=1)) == pytest.approx(1e60, rel=1e-6)


@pytest.mark.parametrize("moments", ["fused", "fp32", "bf16", "8bit"])
def test_optimizers_accept_empty_shards(moments: MomentFormat) -> None:
    empty, full = nn.Parameter(torch.ones(0, 4)), nn.Parameter(torch.ones(2, 4))
    optimizer = (
        torch.optim.AdamW([empty, full], lr=0.5, weight_decay=0.0, fused=True)
        if moments == "fused"
        else LeanAdamW([empty, full], lr=0.5, betas=(0.9, 0.999), eps=1e-8, moments=moments, seed=0)
    )
    for parameter in (empty, full):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(full.detach(), torch.full((2, 4), 0.5))
