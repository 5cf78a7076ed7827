"""Tensor parallelism: supported models and parameter placements. Numerical results are in tests/distributed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.adapters import apply_method
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.parallel.tensor import shard_tensors
from pantheraml.parallel.tp_mappings import LocalParameters, ParameterSlot, distribute, to_local
from pantheraml.parallel.vocabulary import is_vocab_parallel
from pantheraml.specs.train import MethodConfig

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 1 of 4 in a fake process group: enough to check shapes."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh_of(degree: int) -> DeviceMesh:
    return init_device_mesh("cpu", (4 // degree, degree), mesh_dim_names=("replicate", "tensor"))["tensor"]


def llama(**changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **changes}))


def untouched(model: nn.Module) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.usefixtures("world")
def test_model_without_tp_plan_is_rejected() -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel has no tensor-parallel plan") as caught:
        shard_tensors(model, mesh_of(2))
    assert "parallel.shard" in str(caught.value.fix)


@pytest.mark.usefixtures("world")
def test_indivisible_heads_are_rejected_with_degrees_that_work() -> None:
    model = llama(num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(UnsupportedModelError, match="over 4 tensor-parallel ranks: a layer has 2 heads") as caught:
        shard_tensors(model, mesh_of(4))
    assert caught.value.where is not None
    assert caught.value.where.endswith("k_proj")
    assert "parallel.tensor = 2." in str(caught.value.fix)
    assert untouched(model)


@pytest.mark.usefixtures("world")
def test_unknown_tp_style_is_rejected_by_name() -> None:
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=2))
    with pytest.raises(UnsupportedModelError, match="packed_colwise") as caught:
        shard_tensors(model, mesh_of(2))
    assert "experts" in str(caught.value.where)
    assert untouched(model)


@pytest.mark.usefixtures("world")
def test_vocab_that_leaves_a_rank_empty_is_rejected() -> None:
    model = llama(vocab_size=5, num_key_value_heads=4, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    with pytest.raises(UnsupportedModelError, match="vocabulary of 5 cannot be sharded over 4"):
        shard_tensors(model, mesh_of(4))
    assert untouched(model)


@pytest.mark.usefixtures("world")
def test_trainable_parameters_become_dtensors_with_the_same_names() -> None:
    model, original = llama(), llama()
    shard_tensors(model, mesh_of(2))
    sharded = dict(model.named_parameters())
    assert list(sharded) == [name for name, _ in original.named_parameters()]
    placements = {name.removeprefix("model.layers.0."): p.placements for name, p in sharded.items()}
    assert placements["self_attn.q_proj.weight"] == (Shard(0),)
    assert placements["self_attn.o_proj.weight"] == (Shard(1),)
    assert placements["mlp.down_proj.weight"] == (Shard(1),)
    assert placements["input_layernorm.weight"] == (Replicate(),)
    assert placements["model.embed_tokens.weight"] == placements["lm_head.weight"] == (Shard(0),)
    assert is_vocab_parallel(model.lm_head)
    assert not is_vocab_parallel(original.lm_head)
    for name, parameter in original.named_parameters():
        assert sharded[name].shape == parameter.shape, name


@pytest.mark.usefixtures("world")
def test_rank_holds_only_its_shard_in_memory() -> None:
    model = llama(tie_word_embeddings=True)
    before = sum(p.nbytes for name, p in model.named_parameters() if "norm" not in name)
    shard_tensors(model, mesh_of(2))
    parts = [p.to_local() for name, p in model.named_parameters() if "norm" not in name]
    assert sum(part.untyped_storage().nbytes() for part in parts) == before // 2
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.usefixtures("world")
def test_adapters_are_sharded_with_their_layer() -> None:
    model = apply_method(llama(), MethodConfig(kind="dora", rank=4), seed=0)
    shard_tensors(model, mesh_of(2))
    placements = {}
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or isinstance(parameter, DTensor), name
        if isinstance(parameter, DTensor):
            placements[name.partition("layers.0.")[2].replace(".default", "")] = parameter.placements[0]
    assert placements["mlp.up_proj.base_layer.weight"] == Shard(0)
    assert placements["mlp.up_proj.lora_A.weight"] == Replicate()
    assert placements["mlp.up_proj.lora_B.weight"] == Shard(0)
    assert placements["mlp.up_proj.lora_magnitude_vector.weight"] == Shard(0)
    assert placements["mlp.down_proj.base_layer.weight"] == Shard(1)
    assert placements["mlp.down_proj.lora_A.weight"] == Shard(1)
    assert placements["mlp.down_proj.lora_B.weight"] == Replicate()
    assert placements["mlp.down_proj.lora_magnitude_vector.weight"] == Replicate()


@pytest.mark.usefixtures("world")
def test_quantized_layers_keep_this_ranks_shard() -> None:
    model = llama(attention_bias=True)
    quantize_linears(model, "int8", dtype=torch.float32, device=torch.device("cpu"))
    attention = model.model.layers[0].self_attn
    rows, columns = attention.q_proj.dequantize()[16:], attention.o_proj.dequantize()[:, 16:]
    shard_tensors(apply_method(model, MethodConfig(kind="lora", rank=4), seed=0), mesh_of(2))
    assert torch.equal(attention.q_proj.get_base_layer().dequantize(), rows)
    assert torch.equal(attention.o_proj.get_base_layer().dequantize(), columns)
    assert attention.o_proj.get_base_layer().bias is None, "the first rank adds it"


@pytest.mark.usefixtures("world")
def test_parameters_are_restored_after_an_error() -> None:
    layer = nn.Linear(4, 4)
    layer.weight = distribute(nn.Parameter(torch.randn(4, 4)), mesh_of(2), Shard(0))
    LocalParameters(layer, [ParameterSlot(layer, "weight", to_local)])
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, 3))
    assert isinstance(layer.weight, DTensor)


@pytest.mark.usefixtures("world")
def test_activations_are_freed_after_their_layer() -> None:
    model = llama()
    shard_tensors(model, mesh_of(2))
    seen: list[weakref.ref[torch.Tensor]] = []
    norm = model.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda _norm, _args, output: seen.append(weakref.ref(output)))
    with torch.no_grad():
        model(input_ids=torch.arange(5)[None], use_cache=False)
    assert len(seen) == 1
    assert seen[0]() is None
