from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.parallel.fsdp import shard_parameters, without_sync


class Frozen(nn.Module):
    """A frozen int8 linear layer with a non-contiguous weight."""

    qweight: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.randint(-9, 9, (size, size + 3), dtype=torch.int8)[:, :size])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.to(x.dtype).T


class Model(nn.Module):
    """Two layers, and a head whose weight the root reads directly."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(size, size), Frozen(size)) for _ in range(2))
        self.head = nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.weight.T


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Real gloo collectives with world size 1."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


def shard(model: Model, mesh: DeviceMesh) -> None:
    def quantized(module: nn.Module) -> list[str]:
        return [name for name, _ in module.named_buffers()]

    shard_parameters(model, list(model.layers), mesh, quantized_buffers=quantized)


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_quantized_buffers_become_frozen_parameters_of_the_same_name(mesh: DeviceMesh) -> None:
    model = Model()
    before = model.layers[0][1].qweight.clone()  # type: ignore[index,union-attr]
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    shard(model, mesh)
    assert not list(model.buffers())
    found = model.get_parameter("layers.0.1.qweight")
    assert isinstance(found, DTensor)
    assert torch.equal(found.to_local(), before)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trainable


def test_no_grad_forward_reshards_all_parameters(mesh: DeviceMesh) -> None:
    model, x = Model(), torch.randn(2, 4)
    expected = model(x)
    shard(model, mesh)
    assert is_sharded(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert is_sharded(model)
    model(x).sum().backward()
    assert is_sharded(model)


def test_gradients_under_without_sync_are_reduced_by_the_next_backward(mesh: DeviceMesh) -> None:
    model, x = Model(), torch.randn(2, 4)
    shard(model, mesh)
    weight = model.head.weight
    model(x).sum().backward()
    assert isinstance(weight.grad, DTensor)
    once = weight.grad.to_local().clone()
    weight.grad = None
    with without_sync(model):
        model(x).sum().backward()
        assert weight.grad is None
    model(x).sum().backward()
    torch.testing.assert_close(weight.grad.to_local(), 2 * once)


def test_mixed_trainable_dtypes_in_a_layer_are_rejected(mesh: DeviceMesh) -> None:
    model = Model()
    model.layers[1][0].bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))  # type: ignore[index,union-attr]
    with pytest.raises(UnsupportedModelError, match="bfloat16, float32"):
        shard(model, mesh)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_frozen_weights_may_have_any_dtype(mesh: DeviceMesh) -> None:
    model = Model()
    narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=False)
    model.layers[0].register_parameter("narrow", narrow)
    shard(model, mesh)
    model(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if p.requires_grad and "bias" not in name)


def test_scalar_parameter_is_rejected(mesh: DeviceMesh) -> None:
    model = Model()
    model.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UnsupportedModelError, match="gain is a scalar"):
        shard(model, mesh)
