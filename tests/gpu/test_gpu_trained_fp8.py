"""Trained layers that multiply in fp8, on the tensor cores: near the exact products, compiled or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pantheraml.models.quantise.trained_fp8 import TrainedFP8Linear


@pytest.mark.parametrize("rows", [37, 4096])
@pytest.mark.parametrize("compiled", [False, True])
def test_near_the_exact_products(rows: int, compiled: bool) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 products need compute capability 9.0")
    torch.manual_seed(0)
    plain = nn.Linear(2048, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    fp8 = copy.deepcopy(plain)
    fp8.__class__ = TrainedFP8Linear
    call: Any = torch.compile(fp8, fullgraph=True) if compiled else fp8
    given = torch.randn(rows, 2048, device="cuda").bfloat16()
    g = torch.randn(rows, 512, device="cuda").bfloat16()
    results = []
    for layer in (call, plain):
        x = given.clone().requires_grad_()
        out = layer(x)
        out.backward(g)
        results.append((out.detach().float(), x.grad.float()))  # type: ignore[union-attr]
    for found, exact in zip(*results, strict=True):
        assert 0.005 < (found - exact).norm() / exact.norm() < 0.06
    assert fp8.weight.grad is not None
    assert plain.weight.grad is not None
    torch.testing.assert_close(fp8.weight.grad, plain.weight.grad)
