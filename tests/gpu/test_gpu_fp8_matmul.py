"""fp8 matmuls through cuBLASLt without a workspace: correct for any number of rows, and no extra kernels."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from pantheraml.kernels.fp8.matmul import fp8_matmul, reference_fp8_matmul


def operands(rows: int, columns: int = 256, inner: int = 512) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    left, right = (torch.randn(n, inner, device="cuda").to(torch.float8_e4m3fn) for n in (rows, columns))
    return left, torch.rand(rows, device="cuda"), right, torch.rand(columns, device="cuda")


@pytest.mark.parametrize("rows", [1, 7, 12, 64, 100, 513, 4096])
def test_any_number_of_rows(rows: int) -> None:
    arguments = operands(rows)
    expected = reference_fp8_matmul(*arguments)
    assert (fp8_matmul(*arguments, torch.float32) - expected).norm() < 0.01 * expected.norm()


def test_matmuls_do_not_zero_buffers() -> None:
    arguments = operands(2048, 1024)
    fp8_matmul(*arguments, torch.bfloat16)
    with torch.profiler.profile(acc_events=True) as profile:
        fp8_matmul(*arguments, torch.bfloat16)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names
    assert not [name for name in names if "memset" in name.lower()]


def test_other_matmuls_work_after_restoring_the_environment() -> None:
    fp8_matmul(*operands(64), torch.bfloat16)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    with_bias = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
    assert with_bias(torch.ones(128, 64, device="cuda", dtype=torch.bfloat16)).isfinite().all()
    assert fp8_matmul(*operands(65), torch.bfloat16).isfinite().all()
