"""Decoder layers whose weights are read just before the layer is sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.engine.step.loss import LossModel
from pantheraml.models.adapters import apply_method
from pantheraml.models.families import plain_head
from pantheraml.models.lazy_weights import materialize, materialize_per_layer
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.quantized_linear import quantized_buffers
from pantheraml.models.tiny_model import tiny_config
from pantheraml.parallel.fsdp import shard_parameters
from pantheraml.parallel.gather import local_slice, local_tensor
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.specs.train import MethodConfig, ModelConfig
from tests import toy

CPU = torch.device("cpu")
KINDS = ["fp8", "int8", "nf4", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lazy")
    toy.write_llama(place, hidden_size=128, intermediate_size=256, attention_bias=True)
    return place


@contextmanager
def as_rank(rank: int, ranks: int, name: str) -> Iterator[DeviceMesh]:
    """One rank of a fake process group: sharding needs no communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group()


def build(
    folder: Path, quantize: Literal["fp8", "int8", "nf4"] | None, *, lazy: bool, kind: str = "lora"
) -> torch.nn.Module:
    config = ModelConfig(path=str(folder))
    model = load_model(config, dtype=torch.float32, device=CPU, quantize=quantize, lazy_layers=lazy)
    return apply_method(model, MethodConfig.model_validate({"kind": kind, "rank": 8}), seed=0)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def shard(model: Any, mesh: DeviceMesh) -> None:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    shard_parameters(LossModel(model), layers, mesh, quantized_buffers=quantized_buffers, prepare=materialize)


@pytest.mark.parametrize("quantize", KINDS)
def test_lazy_weights_match_eager_weights(folder: Path, quantize: Any) -> None:
    eager, lazy = build(folder, quantize, lazy=False), build(folder, quantize, lazy=True)
    tokens = torch.arange(6)[None]
    assert lazy(tokens).logits.isnan().all(), "placeholders cannot be mistaken for weights"
    materialize(lazy)
    expected, actual = state(eager), state(lazy)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
        assert actual[name].dtype == tensor.dtype
        assert actual[name].requires_grad == tensor.requires_grad
        assert actual[name].is_contiguous()
    assert torch.equal(lazy(tokens).logits, eager(tokens).logits)
    materialize(lazy)  # nothing left to read
    assert state(lazy).keys() == expected.keys()


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("mode", ["shard", "tensor"])
def test_a_rank_gets_its_shard(folder: Path, quantize: Any, mode: str) -> None:
    with as_rank(1, 2, mode) as mesh:
        made = []
        for lazy in (False, True):
            model = build(folder, quantize, lazy=lazy, kind="lora" if quantize else "full")
            if mode == "shard":
                shard(model, mesh)
            else:
                shard_tensors(model, mesh, prepare=materialize)
            made.append(state(model))
        expected, actual = made
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(local_tensor(actual[name]), local_tensor(tensor)), name
        assert any(isinstance(tensor, DTensor) for tensor in actual.values())


def test_each_shard_matches_the_whole(folder: Path) -> None:
    whole = state(build(folder, None, lazy=False, kind="full"))
    with as_rank(2, 4, "shard") as mesh:
        model = build(folder, None, lazy=True, kind="full")
        shard(model, mesh)
        for name, tensor in model.named_parameters():
            assert torch.equal(local_tensor(tensor), local_slice(whole[name], tensor)), name


def memory(model: torch.nn.Module) -> int:
    """Bytes that the model's tensors take on this rank."""
    storages = [local_tensor(tensor).untyped_storage() for tensor in state(model).values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("quantize", KINDS)
def test_a_rank_never_holds_more_than_its_shard_and_one_layer(tmp_path: Path, quantize: Any) -> None:
    toy.write_llama(tmp_path, hidden_size=128, intermediate_size=256, num_hidden_layers=16)
    kind = "lora" if quantize else "full"
    whole = build(tmp_path, quantize, lazy=False, kind=kind)
    layers = [module for module in whole.modules() if isinstance(module, GradientCheckpointingLayer)]
    layer, everything = memory(layers[0]), memory(whole)
    outside = everything - len(layers) * layer
    assert everything > 10 * layer, "most weights are in the layers"
    model = build(tmp_path, quantize, lazy=True, kind=kind)
    most = 0

    def prepare(module: torch.nn.Module) -> None:
        nonlocal most
        materialize(module)
        most = max(most, memory(model))

    with as_rank(0, 8, "shard") as mesh:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        shard_parameters(LossModel(model), layers, mesh, quantized_buffers=quantized_buffers, prepare=prepare)
        adapters = sum(parameter.nbytes for name, parameter in model.named_parameters() if "lora_" in name)
        # not all norms and scales are divisible by 8
        assert most < 1.1 * (everything / 8 + layer + outside + adapters)
        assert most < 0.6 * everything
        assert memory(model) < 1.1 * everything / 8


@pytest.mark.parametrize("quantize", KINDS)
def test_weights_can_exist_only_during_a_layers_forward(folder: Path, quantize: Any) -> None:
    tokens = torch.arange(6)[None]
    expected = build(folder, quantize, lazy=False)(tokens).logits
    model = build(folder, quantize, lazy=True)
    before = memory(model)
    with materialize_per_layer(model):
        assert torch.equal(model(tokens).logits, expected)
        assert memory(model) == before
        assert torch.equal(model(tokens).logits, expected)
    assert memory(model) == before
    assert model(tokens).logits.isnan().all()
    materialize(model)
    assert torch.equal(model(tokens).logits, expected)


def test_plain_head_with_stacked_experts(tmp_path: Path) -> None:
    """GPT-OSS runs all experts in one grouped matmul, whose kernel rejects placeholders."""
    config = tiny_config(AutoConfig.for_model("gpt_oss"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=CPU, lazy_layers=True)
    head, reason = plain_head(model)
    assert head is not None, reason
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    assert all(parameter.isnan().all() for parameter in layer.parameters()), "placeholders again"
