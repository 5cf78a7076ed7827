"""INT8: the error that packing leaves, a gradient equal to that of the dense layer, and whole models with adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from pantheraml.models.adapters import apply_method, parameter_count, trainable_parameters
from pantheraml.models.loader import load_model
from pantheraml.models.quantise.int8 import PIECE, Int8Linear, Int8LoraLinear, Int8Weight
from pantheraml.models.quantise.packed import packed_buffers, unpack_linears
from pantheraml.specs.train import MethodConfig, ModelConfig

CPU = torch.device("cpu")


def linear(rows: int = 48, columns: int = 100, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_value_is_off_by_half_a_step_of_its_row_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(300, 257) * torch.logspace(-4, 2, 300)[:, None]).to(dtype)
    packed = Int8Weight.pack(weight)
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    error = (packed.dequantise(torch.float32) - weight.float()).abs()
    assert bool((error <= step * 0.50001).all())
    assert packed.payload.dtype == torch.int8
    assert bool((packed.payload.abs().amax(dim=1) == 127).all()), "every row uses the whole range"


def test_rows_of_zeros_and_the_largest_values_survive() -> None:
    weight = torch.zeros(4, 8)
    weight[1, 3], weight[2, 5] = 7.0, -3.0
    assert torch.equal(Int8Linear(weight, None).dequantise(), weight)


def test_a_weight_of_several_pieces_is_packed_as_its_rows_are() -> None:
    columns = 1 << 12
    weight = torch.linspace(-1, 1, columns).repeat(PIECE // columns + 3, 1)
    payload = Int8Weight.pack(weight).payload
    assert torch.equal(payload, Int8Weight.pack(weight[:1]).payload.expand_as(payload))


def test_packed_size_is_eight_bits_and_a_scale_per_row() -> None:
    layer = Int8Linear(torch.randn(64, 512), None)
    assert sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers()) == 64 * 512 + 64 * 4
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradient_equal_the_dense_layer(bias: bool) -> None:
    dense = linear(bias=bias)
    packed = Int8Linear(dense.weight, dense.bias)
    stand_in = packed.to_linear(torch.float32)
    x = torch.randn(3, 5, 100, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    seed = torch.randn(3, 5, 48)
    (packed(x) * seed).sum().backward()
    (stand_in(y) * seed).sum().backward()
    torch.testing.assert_close(packed(x), stand_in(y))
    torch.testing.assert_close(x.grad, y.grad)
    assert not torch.allclose(packed(x), dense(x), atol=1e-5)
    torch.testing.assert_close(packed(x), dense(x), atol=0.02, rtol=0)


def test_conv1d_is_a_transposed_linear() -> None:
    torch.manual_seed(0)
    conv = Conv1D(48, 100)
    conv.bias.data.normal_()
    packed = Int8Linear(conv.weight.T, conv.bias, from_conv1d=True)
    restored = packed.to_linear(torch.float32)
    assert isinstance(restored, Conv1D)
    x = torch.randn(2, 100)
    torch.testing.assert_close(packed(x), restored(x))
    torch.testing.assert_close(packed(x), conv(x), atol=0.01, rtol=0.01)


def test_autograd_keeps_no_dense_tensor() -> None:
    layer = Int8Linear(linear(64, 128).weight, None)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(4, 128, requires_grad=True))
    assert kept
    assert all(any(tensor is buffer for buffer in layer.buffers()) for tensor in kept)


def test_autocast_decides_the_arithmetic() -> None:
    dense = linear()
    layer = Int8Linear(dense.weight, dense.bias)
    x = torch.randn(2, 100, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_in_int8_trains_an_adapter_as_the_dense_one_does(tiny_model: Callable[..., Path], family: str) -> None:
    folder = tiny_model(family, initializer_range=0.05)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base: Any = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantise="int8")
    assert parameter_count(base) == parameter_count(plain)
    layers = sum(isinstance(layer, Int8Linear) for layer in base.modules())
    assert [layer for layer in base.modules() if isinstance(layer, nn.Linear | Conv1D)] == [base.lm_head]
    ids = torch.arange(24).view(2, 12) * 7
    gradients = []
    for model in (base, plain):
        adapted: Any = apply_method(model, MethodConfig(rank=2), seed=0)
        with torch.no_grad():
            for _, parameter in trainable_parameters(adapted):
                parameter.add_(0.02)
        adapted(input_ids=ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for _, p in trainable_parameters(adapted)]))  # type: ignore[union-attr]
    assert torch.cosine_similarity(*gradients, dim=0) > 0.999
    assert sum(isinstance(layer, Int8LoraLinear) for layer in base.modules()) == layers
    assert len(packed_buffers(base)) == (3 if family == "gpt2" else 2) * layers  # GPT-2's layers have a bias each


def test_the_way_back_is_plain_layers(tiny_model: Callable[..., Path]) -> None:
    config = ModelConfig(path=str(tiny_model("llama")))
    base = load_model(config, dtype=torch.float32, device=CPU, quantise="int8")
    assert unpack_linears(base, torch.float32) == 14
    assert not any(isinstance(layer, Int8Linear) for layer in base.modules())
