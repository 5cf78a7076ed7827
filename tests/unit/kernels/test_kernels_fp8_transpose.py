"""fp8 transpose, on the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, E4M3_MAX, MIN_SCALE, to_e4m3
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.fp8.transpose import fp8_transpose


def random_codes(rows: int, columns: int) -> Tensor:
    """Every code except NaN, as a slice of wider rows."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns + 48), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(E4M3)[:, 16:-32]


@pytest.mark.parametrize("rows", [1, 37, 64, 130])
def test_transpose_without_factors(rows: int) -> None:
    qdata = random_codes(rows, 48)
    transposed, scales = fp8_transpose(qdata, None)
    assert scales is None
    assert transposed.shape == (48, -(-rows // 16) * 16)
    assert torch.equal(transposed.view(torch.uint8)[:, :rows], qdata.view(torch.uint8).T)
    assert not transposed.view(torch.uint8)[:, rows:].any()


@pytest.mark.parametrize("rows", [1, 37, 64, 130])
def test_similar_factors_are_exact(rows: int) -> None:
    qdata = random_codes(rows, 48)
    magnitudes = qdata.float().abs()
    qdata = torch.where(magnitudes < 4, torch.zeros(()), qdata.float()).to(E4M3)  # 2**6 above the subnormals
    factors = torch.exp2(torch.randint(-53, -50, (rows,)).float())
    transposed, scales = fp8_transpose(qdata, factors)
    assert scales is not None
    exact = qdata.double() * factors.double()[:, None]
    assert torch.equal(transposed[:, :rows].double() * scales.double()[:, None], exact.T)
    assert not transposed.view(torch.uint8)[:, rows:].any()


def test_columns_fill_the_range_and_small_values_are_rounded() -> None:
    qdata, factors = random_codes(130, 48), torch.exp2(torch.randint(-40, 20, (130,)).float())
    qdata.view(torch.uint8)[:, 7] = 0
    transposed, scales = fp8_transpose(qdata, factors)
    assert scales is not None
    assert (torch.frexp(scales).mantissa == 0.5).all()
    exact = qdata.double() * factors.double()[:, None]
    amax = exact.abs().amax(dim=0)
    assert scales[7] == torch.tensor(MIN_SCALE)
    others = torch.arange(48) != 7
    assert (amax <= E4M3_MAX * scales).all()
    assert (amax > E4M3_MAX / 2 * scales)[others].all()
    assert torch.equal(transposed[:, :130].float(), to_e4m3((exact / scales).float()).T.float())


def test_extreme_factors() -> None:
    """A zero row may have the smallest or the largest scale; it must stay zero."""
    qdata = torch.zeros(3, 16).to(E4M3)
    qdata[0] = 1.0
    for extremes in ([2.0**-100, 2.0**110, 1.0], [2.0**110, 2.0**-100, 1.0]):
        transposed, scales = fp8_transpose(qdata, torch.tensor(extremes))
        assert scales is not None
        assert torch.equal(transposed[:, 0].float() * scales, torch.full((16,), extremes[0]))
        assert not transposed[:, 1:].float().any()


def test_nan_stays_in_its_column() -> None:
    qdata, factors = random_codes(37, 48), torch.ones(37)
    qdata.view(torch.uint8)[5, 3] = 0x7F
    transposed, scales = fp8_transpose(qdata, factors)
    assert scales is not None
    real = transposed[:, :37].float() * scales[:, None]
    assert real[3].isnan().all()
    assert real[torch.arange(48) != 3].isfinite().all()
    factors[9] = torch.inf  # scale of a row that contained infinity
    scales = fp8_transpose(qdata, factors)[1]
    assert scales is not None
    assert not scales.isfinite().any()


def test_weight_gradient_matmul() -> None:
    """The weight gradient matches that of the e4m3 rows, and is close to that of the original rows."""
    torch.manual_seed(0)
    g, x = torch.randn(130, 32) * torch.exp2(-6 * torch.rand(130, 1)), torch.randn(130, 48)
    (g_rows, g_scales), (x_rows, x_scales) = reference_quantize_rows(g), reference_quantize_rows(x)
    left, scales = fp8_transpose(g_rows, g_scales * x_scales)
    right = fp8_transpose(x_rows, None)[0]
    assert scales is not None
    actual = (left.double() @ right.double().T) * scales.double()[:, None]
    quantized = (g_rows.double() * g_scales[:, None]).T @ (x_rows.double() * x_scales[:, None])
    exact = g.double().T @ x.double()
    assert (actual - quantized).norm() < 1e-3 * quantized.norm()
    assert (actual - exact).norm() < 0.05 * exact.norm()
