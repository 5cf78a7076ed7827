"""NF4: levels, quantization error, and gradients equal to those of the dequantized layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from pantheraml.kernels.nf4.format import CHUNK, nf4_levels
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.loader import load_model
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import dequantize_linears, quantized_buffers
from pantheraml.specs.train import MethodConfig, ModelConfig

CPU = torch.device("cpu")


def linear(rows: int = 48, columns: int = 100, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias=bias)


def test_levels_are_equally_likely_under_a_normal_distribution() -> None:
    # half a step remains at either end, averaged over the 15 and 16 steps that each side would have alone
    tail = 1 - (1 / 30 + 1 / 32) / 2
    above = torch.special.ndtri(torch.linspace(tail, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(tail, 0.5, 8, dtype=torch.float64)[:-1])
    levels = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    torch.testing.assert_close(nf4_levels(), (levels / levels.max()).float(), atol=5e-7, rtol=0)


def test_a_weight_of_several_chunks_is_quantized_chunk_by_chunk() -> None:
    rows = CHUNK // 4096
    weight = torch.linspace(-1, 1, 4096).repeat(rows + 3, 1) * torch.linspace(1, 2, rows + 3)[:, None]
    whole = NF4Linear(weight.bfloat16(), None)
    last = NF4Linear(weight[rows:].bfloat16(), None)
    assert torch.equal(whole.qweight[-last.qweight.numel() :], last.qweight)
    dense = whole.dequantize(torch.bfloat16)
    assert float((dense[:rows].float() - weight[:rows]).abs().max()) < 0.35
    torch.testing.assert_close(dense[rows:].float(), last.dequantize(), atol=0.02, rtol=0.02)


def test_every_value_rounds_to_the_nearest_level() -> None:
    # a grid over [-1, 1] whose first value fixes the block's scale at exactly 1
    grid = torch.linspace(-1, 1, 64 * 50).view(50, 64)
    grid[:, 0] = 1.0
    quantized = NF4Linear(grid, None).dequantize()
    nearest = (grid[..., None] - nf4_levels()).abs().amin(dim=-1)
    torch.testing.assert_close((quantized - grid).abs(), nearest, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(64, 64), (48, 100), (1, 3), (300, 257)])
def test_quantization_error_is_bounded(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape) * 0.02
    error = (NF4Linear(weight, None).dequantize() - weight).abs()
    padded = F.pad(weight.abs().flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scale = padded.amax(dim=1).repeat_interleave(64)[: weight.numel()].view(shape)
    widest_gap = float(nf4_levels().diff().max()) / 2
    # the scale itself is off by at most half of one 255th of the range of scales
    slack = float(scale.max() - scale.min()) / 510
    assert bool((error <= scale * widest_gap + slack + 1e-7).all())
    if weight.numel() > 4096:
        assert float(error.square().mean().sqrt() / weight.std()) < 0.1


def test_scale_error_is_at_most_half_a_step() -> None:
    torch.manual_seed(2)
    scales = torch.rand(300) + 0.5
    weight = scales[:, None] * torch.ones(64).index_fill(0, torch.arange(0, 64, 2), -1.0)
    error = (NF4Linear(weight, None).dequantize() - weight).abs().amax(dim=1)
    for start in (0, 256):
        part = scales[start : start + 256]
        assert float(error[start : start + 256].max()) <= float(part.max() - part.min()) / 510 + 1e-6


def test_zeros_and_outliers_survive() -> None:
    weight = torch.zeros(64, 64)
    assert torch.equal(NF4Linear(weight, None).dequantize(), weight)
    weight[3, 5] = 7.0
    torch.testing.assert_close(NF4Linear(weight, None).dequantize(), weight, atol=0, rtol=1e-6)


def test_quantized_size_is_about_four_bits() -> None:
    layer = NF4Linear(torch.randn(512, 512), None)
    size = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
    assert 8 * size / 512**2 == pytest.approx(4 + 8 / 64 + 64 / (64 * 256))
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradient_match_the_dequantized_layer(bias: bool) -> None:
    dense = linear(bias=bias)
    quantized = NF4Linear(dense.weight, dense.bias)
    dense_copy = quantized.to_linear(torch.float32)
    assert isinstance(dense_copy, nn.Linear)
    x = torch.randn(3, 5, 100, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    seed = torch.randn(3, 5, 48)
    (quantized(x) * seed).sum().backward()
    (dense_copy(y) * seed).sum().backward()
    torch.testing.assert_close(quantized(x), dense_copy(y))
    torch.testing.assert_close(x.grad, y.grad)
    assert not torch.allclose(quantized(x), dense(x), atol=1e-4)


def test_conv1d_is_a_transposed_linear() -> None:
    torch.manual_seed(0)
    conv = Conv1D(48, 100)
    conv.bias.data.normal_()
    quantized = NF4Linear(conv.weight.T, conv.bias, from_conv1d=True)
    restored = quantized.to_linear(torch.float32)
    assert isinstance(restored, Conv1D)
    assert restored.weight.shape == conv.weight.shape
    x = torch.randn(2, 100)
    torch.testing.assert_close(quantized(x), restored(x))
    torch.testing.assert_close(quantized(x), conv(x), atol=0.1, rtol=0.2)


def test_autograd_saves_no_dense_tensor() -> None:
    layer = NF4Linear(linear(64, 128).weight, None)
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(torch.randn(4, 128, requires_grad=True))
    assert saved
    assert all(tensor.numel() < 64 * 128 for tensor in saved)
    assert all(any(tensor is buffer for buffer in layer.buffers()) for tensor in saved)


def test_autocast_sets_the_compute_dtype() -> None:
    layer = NF4Linear(linear().weight, linear().bias)
    x = torch.randn(2, 100, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_quantized_weights_do_not_depend_on_the_precision_of_the_run(
    tiny_model: Callable[..., Path], family: str
) -> None:
    def buffers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        config = ModelConfig(path=str(tiny_model(family)))
        model = load_model(config, dtype=dtype, device=CPU, quantize="nf4")
        assert model.get_output_embeddings().weight.dtype == dtype
        return {name: b for name, b in model.named_buffers() if "scale_" in name or "qweight" in name}

    narrow, wide = buffers(torch.bfloat16), buffers(torch.float32)
    assert narrow
    assert all(torch.equal(narrow[name], wide[name]) for name in wide)


def test_rope_frequencies_stay_in_float32(tiny_model: Callable[..., Path]) -> None:
    config = ModelConfig(path=str(tiny_model("llama")))
    model: Any = load_model(config, dtype=torch.bfloat16, device=CPU, quantize="nf4")
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_linear_but_the_head_is_quantized(tiny_model: Callable[..., Path], family: str) -> None:
    config = ModelConfig(path=str(tiny_model(family)))
    model: Any = load_model(config, dtype=torch.float32, device=CPU, quantize="nf4")
    dense = [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    assert dense == [model.lm_head]
    count = sum(isinstance(m, NF4Linear) for m in model.modules())
    assert dequantize_linears(model, torch.float32) == count > 0
    assert not any(isinstance(m, NF4Linear) for m in model.modules())


def test_quantized_buffers_have_full_names(tiny_model: Callable[..., Path]) -> None:
    config = ModelConfig(path=str(tiny_model("gpt2")))
    model = load_model(config, dtype=torch.float32, device=CPU, quantize="nf4")
    layers = sum(isinstance(m, NF4Linear) for m in model.modules())
    names = quantized_buffers(model)
    assert len(names) == 5 * layers  # GPT-2's layers have biases
    assert set(names) <= {name for name, _ in model.named_buffers()}


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_gradient_checkpointing_changes_nothing(tiny_model: Callable[..., Path], kind: Any) -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        config = ModelConfig(path=str(tiny_model("llama")))
        base: Any = load_model(config, dtype=torch.float32, device=CPU, quantize="nf4" if kind == "qlora" else None)
        model: Any = apply_method(base, MethodConfig(kind=kind, rank=2), seed=0)
        if checkpointing:
            base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        model(input_ids=torch.arange(12)[None]).logits.logsumexp(dim=-1).sum().backward()
        return {name: p.grad for name, p in trainable_parameters(model) if p.grad is not None}

    plain, recomputed = gradients(False), gradients(True)
    assert any(bool(grad.abs().max() > 0) for grad in plain.values())
    torch.testing.assert_close(recomputed, plain)
