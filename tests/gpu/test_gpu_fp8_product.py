"""Products through cuBLASLt without a workspace: right for any number of rows, and nothing runs besides them."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from pantheraml.kernels.fp8_product import fp8_product, reference_product


def operands(rows: int, columns: int = 256, inner: int = 512) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    left, right = (torch.randn(n, inner, device="cuda").to(torch.float8_e4m3fn) for n in (rows, columns))
    return left, torch.rand(rows, device="cuda"), right, torch.rand(columns, device="cuda")


@pytest.mark.parametrize("rows", [1, 7, 12, 64, 100, 513, 4096])
def test_any_number_of_rows(rows: int) -> None:
    given = operands(rows)
    expected = reference_product(*given)
    assert (fp8_product(*given, torch.float32) - expected).norm() < 0.01 * expected.norm()


def test_nothing_is_set_to_nought_before_a_product() -> None:
    given = operands(2048, 1024)
    fp8_product(*given, torch.bfloat16)
    with torch.profiler.profile(acc_events=True) as profile:
        fp8_product(*given, torch.bfloat16)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names
    assert not [name for name in names if "memset" in name.lower()]


def test_other_products_go_on_when_the_environment_is_put_back() -> None:
    fp8_product(*operands(64), torch.bfloat16)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    with_bias = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    assert with_bias(torch.ones(128, 64, device="cuda", dtype=torch.bfloat16)).isfinite().all()
    assert fp8_product(*operands(65), torch.bfloat16).isfinite().all()
