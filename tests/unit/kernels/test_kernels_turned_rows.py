"""Rows turned over, on the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, LARGEST, SMALLEST_SCALE, to_e4m3
from pantheraml.kernels.quantise_rows import reference_quantise_rows
from pantheraml.kernels.turned_rows import turned_rows


def any_rows(rows: int, columns: int) -> Tensor:
    """Every code but NaN's; columns are not all there is."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (rows, columns + 48), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    return codes.view(E4M3)[:, 16:-32]


@pytest.mark.parametrize("rows", [1, 37, 64, 130])
def test_bytes_alone(rows: int) -> None:
    payload = any_rows(rows, 48)
    turned, scales = turned_rows(payload, None)
    assert scales is None
    assert turned.shape == (48, -(-rows // 16) * 16)
    assert torch.equal(turned.view(torch.uint8)[:, :rows], payload.view(torch.uint8).T)
    assert not turned.view(torch.uint8)[:, rows:].any()


@pytest.mark.parametrize("rows", [1, 37, 64, 130])
def test_factors_that_differ_little_cost_nothing(rows: int) -> None:
    payload = any_rows(rows, 48)
    magnitudes = payload.float().abs()
    payload = torch.where(magnitudes < 4, torch.zeros(()), payload.float()).to(E4M3)  # 2**6 above the subnormal ones
    factors = torch.exp2(torch.randint(-53, -50, (rows,)).float())
    turned, scales = turned_rows(payload, factors)
    assert scales is not None
    exact = payload.double() * factors.double()[:, None]
    assert torch.equal(turned[:, :rows].double() * scales.double()[:, None], exact.T)
    assert not turned.view(torch.uint8)[:, rows:].any()


def test_columns_come_just_within_the_range_and_what_is_small_is_rounded() -> None:
    payload, factors = any_rows(130, 48), torch.exp2(torch.randint(-40, 20, (130,)).float())
    payload.view(torch.uint8)[:, 7] = 0
    turned, scales = turned_rows(payload, factors)
    assert scales is not None
    assert (torch.frexp(scales).mantissa == 0.5).all()
    exact = payload.double() * factors.double()[:, None]
    most = exact.abs().amax(dim=0)
    assert scales[7] == torch.tensor(SMALLEST_SCALE)
    others = torch.arange(48) != 7
    assert (most <= LARGEST * scales).all()
    assert (most > LARGEST / 2 * scales)[others].all()
    assert torch.equal(turned[:, :130].float(), to_e4m3((exact / scales).float()).T.float())


def test_factors_at_both_ends() -> None:
    """A row of noughts has the smallest scale or may have the largest: neither makes anything of nought."""
    payload = torch.zeros(3, 16).to(E4M3)
    payload[0] = 1.0
    for ends in ([2.0**-100, 2.0**110, 1.0], [2.0**110, 2.0**-100, 1.0]):
        turned, scales = turned_rows(payload, torch.tensor(ends))
        assert scales is not None
        assert torch.equal(turned[:, 0].float() * scales, torch.full((16,), ends[0]))
        assert not turned[:, 1:].float().any()


def test_what_is_no_number_stays_in_its_column() -> None:
    payload, factors = any_rows(37, 48), torch.ones(37)
    payload.view(torch.uint8)[5, 3] = 0x7F
    turned, scales = turned_rows(payload, factors)
    assert scales is not None
    real = turned[:, :37].float() * scales[:, None]
    assert real[3].isnan().all()
    assert real[torch.arange(48) != 3].isfinite().all()
    factors[9] = torch.inf  # the scale of a row that had something infinite in it
    scales = turned_rows(payload, factors)[1]
    assert scales is not None
    assert not scales.isfinite().any()


def test_a_product_over_rows() -> None:
    """The gradient of a weight: as the rows in e4m3 have it, and near that of the rows themselves."""
    torch.manual_seed(0)
    g, x = torch.randn(130, 32) * torch.exp2(-6 * torch.rand(130, 1)), torch.randn(130, 48)
    (g_rows, g_scales), (x_rows, x_scales) = reference_quantise_rows(g), reference_quantise_rows(x)
    left, scales = turned_rows(g_rows, g_scales * x_scales)
    right = turned_rows(x_rows, None)[0]
    assert scales is not None
    found = (left.double() @ right.double().T) * scales.double()[:, None]
    held = (g_rows.double() * g_scales[:, None]).T @ (x_rows.double() * x_scales[:, None])
    exact = g.double().T @ x.double()
    assert (found - held).norm() < 1e-3 * held.norm()
    assert (found - exact).norm() < 0.05 * exact.norm()
