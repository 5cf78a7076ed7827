"""fp8 matmuls of a fused group, on numbers that fp8 holds exactly: any wrong scale or index shows in full."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from pantheraml.models.fast.group_set import GroupSet
from pantheraml.models.fast.linear_groups import LoraGroup
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.quantized_linear import LORA_LAYERS

WIDTH, ROWS = 48, 120
HEIGHTS = {"a": 32, "b": 16, "c": 64}
END = 1.75
"""The largest e4m3 value is this times a power of two; if it is a row's maximum, the scale is a power of two as
well.
"""


def powers(*shape: int, low: int = -1, high: int = 2) -> Tensor:
    """Signed powers of two, whose pairwise products are again powers of two."""
    return torch.exp2(torch.randint(low, high + 1, shape)) * (torch.randint(0, 2, shape) * 2 - 1)


def single(rows: int, columns: int) -> Tensor:
    """One non-zero number per row, so that a matmul with it has one term."""
    mask = torch.arange(rows)[:, None] % columns == torch.arange(columns)
    return powers(rows, 1) * mask


class Layers(nn.Module):
    def __init__(self, weights: dict[str, Tensor], biases: dict[str, Tensor], *, fp8: bool, rows: bool) -> None:
        super().__init__()
        self.dtype_of_the_model = nn.Parameter(torch.zeros(1), requires_grad=False)  # PEFT reads a dtype
        for name, weight in weights.items():
            layer: nn.Module
            if fp8:
                layer = FP8Linear(weight, biases.get(name), scales="rows" if rows else None)
            else:
                layer = nn.Linear(*reversed(weight.shape), bias=name in biases)
                layer.weight.data.copy_(weight)
                if name in biases:
                    layer.bias.data.copy_(biases[name])
            self.add_module(name, layer.requires_grad_(False))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in HEIGHTS], dim=1)


def group_of(*, fp8: bool, rows: bool, targets: list[str]) -> tuple[Any, list[nn.Parameter]]:
    """Return a model of three layers with adapters of ranks 4, 2 and 4, and its trainable parameters."""
    torch.manual_seed(0)
    weights = {name: powers(height, WIDTH) for name, height in HEIGHTS.items()}
    if rows:  # rows that differ by more than one scale can hold
        weights = {
            name: END * weight * torch.exp2(-4.0 * (torch.arange(len(weight)) % 4))[:, None]
            for name, weight in weights.items()
        }
    ranks = {"b": 2} if "b" in targets else {}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, rank_pattern=ranks, alpha_pattern={"c": 1})
    config._register_custom_module(LORA_LAYERS)
    model = get_peft_model(Layers(weights, {"b": powers(16)}, fp8=fp8, rows=rows), config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.manual_seed(1)
    for parameter in trained:
        parameter.data.copy_(END * powers(*parameter.shape))
    return model, trained


@pytest.mark.parametrize("targets", [["a", "b", "c"], ["c"], ["a", "c"]])
@pytest.mark.parametrize("rows", [False, True], ids=["one scale", "scales"])
def test_every_number_is_in_its_place(rows: bool, targets: list[str]) -> None:
    x, g = single(ROWS, WIDTH), single(ROWS, sum(HEIGHTS.values()))
    collected = []
    for fp8 in (True, False):
        model, trained = group_of(fp8=fp8, rows=rows, targets=targets)
        if fp8:
            layers = model.base_model.model
            group = LoraGroup([getattr(layers, name) for name in HEIGHTS])
            assert (group.shared_scale is None) == rows
            GroupSet([group]).refresh()
            assert {id(parameter) for parameter in group.parameters()} == {id(parameter) for parameter in trained}
            operand = group.operand(x)
            out, lora_mid = group.forward(operand)
            d_input, gradients = group.backward(group.gradient_operand(g), operand, lora_mid)
            by_parameter = dict(zip(map(id, group.parameters()), gradients, strict=True))
            collected.append([out, d_input, *(by_parameter[id(parameter)] for parameter in trained)])
        else:
            x_leaf = x.clone().requires_grad_()
            out = model(x_leaf)
            collected.append([out.detach(), *torch.autograd.grad(out, [x_leaf, *trained], g)])
    for ours, theirs in zip(*collected, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * float(theirs.abs().max()))
