from __future__ import annotations

import pytest
import torch
import triton.language as tl

from pantheraml.kernels import triton_support
from pantheraml.kernels.fp8.e4m3 import E4M3, LIMIT
from pantheraml.kernels.fp8.quantize_rows import copy_rows, quantize_rows, reference_quantize_rows, triton_kernel


def random_rows() -> torch.Tensor:
    """Rows with magnitudes over six decades, and a row of zeros."""
    x = torch.randn(9, 200) * 10 ** torch.linspace(-3, 3, 9)[:, None]
    x[4] = 0
    return x


def check_quantize(x: torch.Tensor, multiplier: torch.Tensor | None, pad_cols: int) -> None:
    qdata, scales = quantize_rows(x, pad_cols=pad_cols, multiplier=multiplier)
    assert qdata.shape == (x.shape[0], x.shape[1] + pad_cols)
    expected, expected_scales = reference_quantize_rows(x, multiplier)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(qdata[:, : x.shape[1]].float(), expected.float())


@pytest.mark.parametrize("widest", [16384, 64], ids=["whole", "chunks"])
@pytest.mark.parametrize("scaled", [False, True])
def test_quantize_matches_reference(widest: int, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_MAX_BLOCK", widest)
    check_quantize(random_rows(), torch.rand(200) if scaled else None, pad_cols=128)


def test_any_strides() -> None:
    wide = torch.randn(24, 12)
    check_quantize(wide[:, 3:10], None, pad_cols=0)
    check_quantize(wide.T, None, pad_cols=0)


def test_every_code_and_rounding_boundary() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    codes = codes[codes <= LIMIT]
    boundaries = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([boundaries.nextafter(torch.tensor(0.0)), boundaries.nextafter(torch.tensor(1e9))])
    values = torch.cat([codes, boundaries, near])
    check_quantize(torch.cat([values, -values])[None], None, pad_cols=0)  # the amax is LIMIT, so the scale is 1


@pytest.mark.parametrize("widest", [16384, 64], ids=["whole", "chunks"])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nonfinite_rows_become_nan(value: float, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_MAX_BLOCK", widest)
    x = random_rows()
    x[[0, 2], [3, 170]] = value
    qdata, scales = quantize_rows(x)
    actual = qdata.float() * scales[:, None]
    assert actual[[0, 2]].isnan().all()
    finite_rows = [1, 3, 4, 5, 6, 7, 8]
    expected, expected_scales = reference_quantize_rows(x)
    assert torch.equal(actual[finite_rows], expected[finite_rows].float() * expected_scales[finite_rows, None])
    assert not expected_scales[[0, 2]].isfinite().any()


def scale_boundaries() -> torch.Tensor:
    """Rows whose amax is LIMIT times a power of two, one ulp away from that, zero, or float32's maximum."""
    powers = LIMIT * torch.exp2(torch.arange(-145, 122, 10).float())
    magnitudes = torch.cat([powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(torch.inf))])
    magnitudes = torch.cat([magnitudes, torch.tensor([0.0, torch.finfo(torch.float32).max])])
    return magnitudes[:, None] * torch.tensor([0.3, -1.0, 0.1])


def test_scales_are_exact_powers_of_two() -> None:
    check_quantize(scale_boundaries(), None, pad_cols=0)
    scales = quantize_rows(scale_boundaries())[1]
    assert (torch.frexp(scales).mantissa == 0.5).all()


@pytest.mark.parametrize("limit", [112.0001, 111.9999])
def test_small_error_is_detected(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "LIMIT", tl.constexpr(limit))
    with pytest.raises(AssertionError):
        check_quantize(scale_boundaries(), None, pad_cols=0)


def check_copy(x: torch.Tensor, pad_cols: int) -> None:
    """Check the copy, and that the padding is not written; `x` has no NaN."""
    actual = copy_rows(x, pad_cols=pad_cols, dtype=x.dtype)
    assert actual.shape == (x.shape[0], x.shape[1] + pad_cols)
    assert torch.equal(actual[:, : x.shape[1]], x)
    assert actual[:, x.shape[1] :].isnan().all()


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("block", [4096, 64], ids=["whole", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copy(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_COPY_BLOCK", block)
    x = random_rows().to(dtype)
    for pad_cols in (0, 64):
        check_copy(x, pad_cols)
        check_copy(x[:, 3:170], pad_cols)
        check_copy(x.T, pad_cols)
        check_copy(x[:1].expand(5, -1), pad_cols)


def test_copy_to_another_dtype() -> None:
    x = torch.randint(-100, 100, (9, 200)).float()  # exact in bf16
    actual = copy_rows(x, pad_cols=64, dtype=torch.bfloat16)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual[:, :200].float(), x)
