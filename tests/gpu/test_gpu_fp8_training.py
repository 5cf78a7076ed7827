"""Trainable layers with fp8 matmuls on the tensor cores: close to exact matmuls, compiled or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pantheraml.models.quantize.fp8_training import FP8TrainingLinear


@pytest.mark.parametrize("rows", [37, 4096])
@pytest.mark.parametrize("compiled", [False, True])
def test_close_to_exact_matmuls(rows: int, compiled: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")
    torch.manual_seed(0)
    plain = nn.Linear(2048, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    fp8 = copy.deepcopy(plain)
    fp8.__class__ = FP8TrainingLinear
    call: Any = torch.compile(fp8, fullgraph=True) if compiled else fp8
    inputs = torch.randn(rows, 2048, device="cuda").bfloat16()
    g = torch.randn(rows, 512, device="cuda").bfloat16()
    results = []
    for layer in (call, plain):
        x = inputs.clone().requires_grad_()
        out = layer(x)
        out.backward(g)
        results.append((out.detach().float(), x.grad.float()))  # type: ignore[union-attr]
    for actual, exact in zip(*results, strict=True):
        assert 0.005 < (actual - exact).norm() / exact.norm() < 0.06
    assert fp8.weight.grad is not None
    assert plain.weight.grad is not None
    torch.testing.assert_close(fp8.weight.grad, plain.weight.grad)
