"""Trainable linear layers with fp8 matmuls: the forward and the input gradient.

Weights, their gradients and saved activations keep their dtype. In every pass the rows of activations, output gradients
and weights are quantized to e4m3 with a scale per row. The weight gradient is a sum over tokens, whose rows have no
common scale, so it stays in the run's precision, except in fused layers (`models.fast.trainable_group`), which do all
three matmuls in fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.kernels.fp8.matmul import fp8_matmul
from pantheraml.kernels.fp8.quantize_rows import quantize_rows
from pantheraml.models.quantize.fp8 import TENSOR_CORE


class FP8TrainingLinear(nn.Linear):
    """An `nn.Linear` whose forward and input-gradient matmuls run in fp8."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.reshape(-1, self.in_features).to(dtype)
        out: Tensor = torch.ops.pantheraml.fp8_linear(rows, self.weight)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(dtype)


# Custom ops are opaque to torch.compile: when torch 2.11 traced into them, it compiled matmuls that returned zeros.
@torch.library.custom_op("pantheraml::fp8_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return fp8_matmul(*quantize_rows(x), *quantize_rows(weight), x.dtype)


@torch.library.custom_op("pantheraml::fp8_linear_back", mutates_args=(), schema="(Tensor g, Tensor weight) -> Tensor")
def _input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    return fp8_matmul(*quantize_rows(g), *quantize_rows(weight.t()), g.dtype)


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_input_gradient.register_fake
def _(g: Tensor, weight: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], weight.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    d_input = torch.ops.pantheraml.fp8_linear_back(g, weight) if ctx.needs_input_grad[0] else None
    return d_input, (g.t() @ x).to(weight.dtype) if ctx.needs_input_grad[1] else None


_linear.register_autograd(_backward, setup_context=_setup_context)


def use_fp8_matmuls(model: nn.Module) -> int:
    """Switch the trainable linear layers of the decoder layers to fp8 matmuls, in place; return how many.

    The output head is left alone: small differences between logits matter there.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    linears = [module for layer in layers for module in layer.modules() if _can_be_fp8(module)]
    for module in linears:
        module.__class__ = FP8TrainingLinear
    return len(linears)


def _can_be_fp8(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.requires_grad
        and module.in_features % TENSOR_CORE == 0
        and module.out_features % TENSOR_CORE == 0
    )
