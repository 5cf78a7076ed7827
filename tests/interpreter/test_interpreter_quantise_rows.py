from __future__ import annotations

import pytest
import torch
import triton.language as tl

from pantheraml.kernels import triton_support
from pantheraml.kernels.e4m3 import E4M3, LIMIT
from pantheraml.kernels.quantise_rows import copy_rows, quantise_rows, reference_quantise_rows, triton_kernel


def rows() -> torch.Tensor:
    """Magnitudes over six decades, and a row of zeros."""
    x = torch.randn(9, 200) * 10 ** torch.linspace(-3, 3, 9)[:, None]
    x[4] = 0
    return x


def assert_exact(x: torch.Tensor, multiplier: torch.Tensor | None, room: int) -> None:
    payload, scales = quantise_rows(x, room=room, multiplier=multiplier)
    assert payload.shape == (x.shape[0], x.shape[1] + room)
    wanted, wanted_scales = reference_quantise_rows(x, multiplier)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(payload[:, : x.shape[1]].float(), wanted.float())


@pytest.mark.parametrize("widest", [16384, 64], ids=["whole", "chunks"])
@pytest.mark.parametrize("scaled", [False, True])
def test_rows(widest: int, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_WIDEST", widest)
    assert_exact(rows(), torch.rand(200) if scaled else None, room=128)


def test_any_strides() -> None:
    wide = torch.randn(24, 12)
    assert_exact(wide[:, 3:10], None, room=0)
    assert_exact(wide.T, None, room=0)


def test_every_code_and_every_border_between_two() -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()
    codes = codes[codes <= LIMIT]
    borders = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([borders.nextafter(torch.tensor(0.0)), borders.nextafter(torch.tensor(1e9))])
    values = torch.cat([codes, borders, near])
    assert_exact(torch.cat([values, -values])[None], None, room=0)  # the largest is LIMIT, so the scale is 1


@pytest.mark.parametrize("widest", [16384, 64], ids=["whole", "chunks"])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_no_number_is_none_afterwards(value: float, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_WIDEST", widest)
    x = rows()
    x[[0, 2], [3, 170]] = value
    payload, scales = quantise_rows(x)
    found = payload.float() * scales[:, None]
    assert found[[0, 2]].isnan().all()
    kept = [1, 3, 4, 5, 6, 7, 8]
    wanted, wanted_scales = reference_quantise_rows(x)
    assert torch.equal(found[kept], wanted[kept].float() * wanted_scales[kept, None])
    assert not wanted_scales[[0, 2]].isfinite().any()


def borders() -> torch.Tensor:
    """Rows whose largest magnitudes are LIMIT times powers of two, or next to that, or what float32 ends with."""
    powers = LIMIT * torch.exp2(torch.arange(-145, 122, 10).float())
    magnitudes = torch.cat([powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(torch.inf))])
    magnitudes = torch.cat([magnitudes, torch.tensor([0.0, torch.finfo(torch.float32).max])])
    return magnitudes[:, None] * torch.tensor([0.3, -1.0, 0.1])


def test_scales_are_powers_of_two_to_the_last_bit() -> None:
    assert_exact(borders(), None, room=0)
    scales = quantise_rows(borders())[1]
    assert (torch.frexp(scales).mantissa == 0.5).all()


@pytest.mark.parametrize("limit", [112.0001, 111.9999])
def test_a_small_error_would_show(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "LIMIT", tl.constexpr(limit))
    with pytest.raises(AssertionError):
        assert_exact(borders(), None, room=0)


def assert_copied(x: torch.Tensor, room: int) -> None:
    """With nothing written beside the rows: `x` has no NaN."""
    found = copy_rows(x, room=room, dtype=x.dtype)
    assert found.shape == (x.shape[0], x.shape[1] + room)
    assert torch.equal(found[:, : x.shape[1]], x)
    assert found[:, x.shape[1] :].isnan().all()


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("piece", [4096, 64], ids=["whole", "pieces"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copies(piece: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PIECE", piece)
    x = rows().to(dtype)
    for room in (0, 64):
        assert_copied(x, room)
        assert_copied(x[:, 3:170], room)
        assert_copied(x.T, room)
        assert_copied(x[:1].expand(5, -1), room)


def test_copies_in_another_dtype() -> None:
    x = torch.randint(-100, 100, (9, 200)).float()  # which bf16 holds exactly
    found = copy_rows(x, room=64, dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found[:, :200].float(), x)
