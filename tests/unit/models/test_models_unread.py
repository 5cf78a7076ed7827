"""Weights of decoder layers that are read when a layer is about to be cut."""

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

from pantheraml.engine.loss import LossModel
from pantheraml.models.adapters import apply_method
from pantheraml.models.families import plain_head
from pantheraml.models.loader import load_model
from pantheraml.models.quantise.packed import packed_buffers
from pantheraml.models.tiny import tiny_config
from pantheraml.models.unread import read_in_turn, read_weights
from pantheraml.parallel.fsdp import shard_parameters
from pantheraml.parallel.gather import held, own_part
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.specs.train import MethodConfig, ModelConfig
from tests import toy

CPU = torch.device("cpu")
KINDS = ["fp8", "int8", "nf4", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("unread")
    toy.write_llama(place, hidden_size=128, intermediate_size=256, attention_bias=True)
    return place


@contextmanager
def as_rank(rank: int, ranks: int, name: str) -> Iterator[DeviceMesh]:
    """One process of several, of which only this one exists: cutting needs no messages."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=(name,))
    finally:
        dist.destroy_process_group()


def build(
    folder: Path, quantise: Literal["fp8", "int8", "nf4"] | None, *, unread: bool, kind: str = "lora"
) -> torch.nn.Module:
    config = ModelConfig(path=str(folder))
    model = load_model(config, dtype=torch.float32, device=CPU, quantise=quantise, layers_unread=unread)
    return apply_method(model, MethodConfig.model_validate({"kind": kind, "rank": 8}), seed=0)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def shard(model: Any, mesh: DeviceMesh) -> None:
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    shard_parameters(LossModel(model), layers, mesh, packed_buffers=packed_buffers, prepare=read_weights)


@pytest.mark.parametrize("quantise", KINDS)
def test_what_is_read_later_is_what_is_read_at_once(folder: Path, quantise: Any) -> None:
    at_once, later = build(folder, quantise, unread=False), build(folder, quantise, unread=True)
    tokens = torch.arange(6)[None]
    assert later(tokens).logits.isnan().all(), "nobody can mistake stand-ins for weights"
    read_weights(later)
    expected, found = state(at_once), state(later)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
        assert found[name].requires_grad == tensor.requires_grad
        assert found[name].is_contiguous()
    assert torch.equal(later(tokens).logits, at_once(tokens).logits)
    read_weights(later)  # there is nothing left to do
    assert state(later).keys() == expected.keys()


@pytest.mark.parametrize("quantise", KINDS)
@pytest.mark.parametrize("mode", ["shard", "tensor"])
def test_a_rank_gets_its_part(folder: Path, quantise: Any, mode: str) -> None:
    with as_rank(1, 2, mode) as mesh:
        made = []
        for unread in (False, True):
            model = build(folder, quantise, unread=unread, kind="lora" if quantise else "full")
            if mode == "shard":
                shard(model, mesh)
            else:
                shard_tensors(model, mesh, prepare=read_weights)
            made.append(state(model))
        expected, found = made
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(held(found[name]), held(tensor)), name
        assert any(isinstance(tensor, DTensor) for tensor in found.values())


def test_each_part_is_that_of_the_whole(folder: Path) -> None:
    whole = state(build(folder, None, unread=False, kind="full"))
    with as_rank(2, 4, "shard") as mesh:
        model = build(folder, None, unread=True, kind="full")
        shard(model, mesh)
        for name, tensor in model.named_parameters():
            assert torch.equal(held(tensor), own_part(whole[name], tensor)), name


def memory(model: torch.nn.Module) -> int:
    """Bytes that the model's tensors take on this rank."""
    storages = [held(tensor).untyped_storage() for tensor in state(model).values()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("quantise", KINDS)
def test_a_rank_never_holds_more_than_its_part_and_one_layer(tmp_path: Path, quantise: Any) -> None:
    toy.write_llama(tmp_path, hidden_size=128, intermediate_size=256, num_hidden_layers=16)
    kind = "lora" if quantise else "full"
    whole = build(tmp_path, quantise, unread=False, kind=kind)
    layers = [module for module in whole.modules() if isinstance(module, GradientCheckpointingLayer)]
    layer, everything = memory(layers[0]), memory(whole)
    outside = everything - len(layers) * layer
    assert everything > 10 * layer, "the layers are most of it"
    model = build(tmp_path, quantise, unread=True, kind=kind)
    most = 0

    def prepare(module: torch.nn.Module) -> None:
        nonlocal most
        read_weights(module)
        most = max(most, memory(model))

    with as_rank(0, 8, "shard") as mesh:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        shard_parameters(LossModel(model), layers, mesh, packed_buffers=packed_buffers, prepare=prepare)
        adapters = sum(parameter.nbytes for name, parameter in model.named_parameters() if "lora_" in name)
        # norms and scales do not all divide by 8
        assert most < 1.1 * (everything / 8 + layer + outside + adapters)
        assert most < 0.6 * everything
        assert memory(model) < 1.1 * everything / 8


@pytest.mark.parametrize("quantise", KINDS)
def test_weights_can_be_there_just_while_a_layer_computes(folder: Path, quantise: Any) -> None:
    tokens = torch.arange(6)[None]
    expected = build(folder, quantise, unread=False)(tokens).logits
    model = build(folder, quantise, unread=True)
    before = memory(model)
    with read_in_turn(model):
        assert torch.equal(model(tokens).logits, expected)
        assert memory(model) == before
        assert torch.equal(model(tokens).logits, expected)
    assert memory(model) == before
    assert model(tokens).logits.isnan().all()
    read_weights(model)
    assert torch.equal(model(tokens).logits, expected)


def test_a_head_is_found_where_experts_are_one_tensor(tmp_path: Path) -> None:
    """GPT-OSS multiplies all experts at once, by a kernel that refuses stand-ins without memory."""
    config = tiny_config(AutoConfig.for_model("gpt_oss"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=CPU, layers_unread=True)
    head, reason = plain_head(model)
    assert head is not None, reason
    layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    assert all(parameter.isnan().all() for parameter in layer.parameters()), "unread as before"
