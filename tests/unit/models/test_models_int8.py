"""INT8: quantization error, gradients equal to those of the dequantized layer, and whole models with adapters."""

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
from pantheraml.models.quantize.int8 import CHUNK_VALUES, Int8Linear, Int8LoraLinear, Int8Weight
from pantheraml.models.quantize.quantized_linear import dequantize_linears, quantized_buffers
from pantheraml.specs.train import MethodConfig, ModelConfig

CPU = torch.device("cpu")


def linear(rows: int = 48, columns: int = 100, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step_of_the_row(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(300, 257) * torch.logspace(-4, 2, 300)[:, None]).to(dtype)
    quantized = Int8Weight.quantize(weight)
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    error = (quantized.dequantize(torch.float32) - weight.float()).abs()
    assert bool((error <= step * 0.50001).all())
    assert quantized.qdata.dtype == torch.int8
    assert bool((quantized.qdata.abs().amax(dim=1) == 127).all()), "every row uses the whole range"


def test_rows_of_zeros_and_the_largest_values_survive() -> None:
    weight = torch.zeros(4, 8)
    weight[1, 3], weight[2, 5] = 7.0, -3.0
    assert torch.equal(Int8Linear(weight, None).dequantize(), weight)


def test_a_weight_of_several_chunks_is_quantized_row_by_row() -> None:
    columns = 1 << 12
    weight = torch.linspace(-1, 1, columns).repeat(CHUNK_VALUES // columns + 3, 1)
    qdata = Int8Weight.quantize(weight).qdata
    assert torch.equal(qdata, Int8Weight.quantize(weight[:1]).qdata.expand_as(qdata))


def test_quantized_size_is_eight_bits_and_a_scale_per_row() -> None:
    layer = Int8Linear(torch.randn(64, 512), None)
    assert sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers()) == 64 * 512 + 64 * 4
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradient_match_the_dequantized_layer(bias: bool) -> None:
    dense = linear(bias=bias)
    quantized = Int8Linear(dense.weight, dense.bias)
    dense_copy = quantized.to_linear(torch.float32)
    x = torch.randn(3, 5, 100, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    seed = torch.randn(3, 5, 48)
    (quantized(x) * seed).sum().backward()
    (dense_copy(y) * seed).sum().backward()
    torch.testing.assert_close(quantized(x), dense_copy(y))
    torch.testing.assert_close(x.grad, y.grad)
    assert not torch.allclose(quantized(x), dense(x), atol=1e-5)
    torch.testing.assert_close(quantized(x), dense(x), atol=0.02, rtol=0)


def test_conv1d_is_a_transposed_linear() -> None:
    torch.manual_seed(0)
    conv = Conv1D(48, 100)
    conv.bias.data.normal_()
    quantized = Int8Linear(conv.weight.T, conv.bias, from_conv1d=True)
    restored = quantized.to_linear(torch.float32)
    assert isinstance(restored, Conv1D)
    x = torch.randn(2, 100)
    torch.testing.assert_close(quantized(x), restored(x))
    torch.testing.assert_close(quantized(x), conv(x), atol=0.01, rtol=0.01)


def test_autograd_saves_no_dense_tensor() -> None:
    layer = Int8Linear(linear(64, 128).weight, None)
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(torch.randn(4, 128, requires_grad=True))
    assert saved
    assert all(any(tensor is buffer for buffer in layer.buffers()) for tensor in saved)


def test_autocast_sets_the_compute_dtype() -> None:
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
def test_adapter_gradients_over_int8_are_near_the_dense_ones(tiny_model: Callable[..., Path], family: str) -> None:
    folder = tiny_model(family, initializer_range=0.05)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base: Any = load_model(ModelConfig(path=str(folder)), dtype=torch.float32, device=CPU, quantize="int8")
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
    assert len(quantized_buffers(base)) == (3 if family == "gpt2" else 2) * layers  # GPT-2's layers have biases


def test_dequantizing_gives_plain_layers(tiny_model: Callable[..., Path]) -> None:
    config = ModelConfig(path=str(tiny_model("llama")))
    base = load_model(config, dtype=torch.float32, device=CPU, quantize="int8")
    assert dequantize_linears(base, torch.float32) == 14
    assert not any(isinstance(layer, Int8Linear) for layer in base.modules())
