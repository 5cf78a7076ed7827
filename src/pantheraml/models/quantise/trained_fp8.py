"""Trained linear layers whose products are in fp8: the forward one, and the one for the gradient of the input.

Weights and their gradients stay as they are, and so does what is kept for the backward pass. In every pass the rows of
activations, of gradients and of the weight are rounded to e4m3, each with a scale of its own. The gradient of the
weight is a sum over all tokens, whose rows have no scale in common; it stays in the run's arithmetic, but for fused
layers (`models.fast.trained`), which have all three products in fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.kernels.fp8_product import fp8_product
from pantheraml.kernels.quantise_rows import quantise_rows
from pantheraml.models.quantise.fp8 import TENSOR_CORE


class TrainedFP8Linear(nn.Linear):
    """An `nn.Linear` in all but its arithmetic."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.reshape(-1, self.in_features).to(dtype)
        out: Tensor = torch.ops.pantheraml.fp8_linear(rows, self.weight)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(dtype)


# Operators, so that a compiler takes them as they are: torch 2.11's, given their parts, made products of zeros.
@torch.library.custom_op("pantheraml::fp8_linear", mutates_args=(), schema="(Tensor x, Tensor weight) -> Tensor")
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return fp8_product(*quantise_rows(x), *quantise_rows(weight), x.dtype)


@torch.library.custom_op("pantheraml::fp8_linear_back", mutates_args=(), schema="(Tensor g, Tensor weight) -> Tensor")
def _input_gradient(g: Tensor, weight: Tensor) -> Tensor:
    return fp8_product(*quantise_rows(g), *quantise_rows(weight.t()), g.dtype)


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_input_gradient.register_fake
def _(g: Tensor, weight: Tensor) -> Tensor:
    return g.new_empty(g.shape[0], weight.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    d_input = torch.ops.pantheraml.fp8_linear_back(g, weight) if ctx.needs_input_grad[0] else None
    return d_input, (g.t() @ x).to(weight.dtype) if ctx.needs_input_grad[1] else None


_linear.register_autograd(_backward, setup_context=_keep)


def use_fp8_products(model: nn.Module) -> int:
    """Have the trained linear layers of the model's decoder layers multiply in fp8, in place; how many there are. The
    output head, where small differences between logits count, stays as it is."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    found = [module for layer in layers for module in layer.modules() if _can_be_fp8(module)]
    for module in found:
        module.__class__ = TrainedFP8Linear
    return len(found)


def _can_be_fp8(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.requires_grad
        and module.in_features % TENSOR_CORE == 0
        and module.out_features % TENSOR_CORE == 0
    )
