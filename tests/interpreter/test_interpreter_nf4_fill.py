"""NF4 to e4m3 in place: exactly what dequantising, dividing and rounding give, and nothing beside it touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, LIMIT
from pantheraml.kernels.lora_columns import Adapter, AdapterPlaces, AdapterTable
from pantheraml.kernels.lora_columns.reference import reference_write
from pantheraml.kernels.nf4 import BlockScales, NF4Weight, levels_on
from pantheraml.kernels.nf4_fill import nf4_fill, nf4_row_scales, reference_fill, triton_kernel

UNTOUCHED = 0x55
SHAPES = [(16, 64), (48, 128), (130, 320), (259, 192)]
"""Fewer blocks than a program takes, and tails of rows and of blocks; the last has several blocks of magnitudes."""
STORAGES = ["codes", "table", "float32"]


def packed(rows: int, columns: int, storage: str = "codes") -> NF4Weight:
    """Rows of magnitudes that differ tenfold, one of them nought."""
    dense = torch.randn(rows, columns) * 10 ** torch.rand(rows, 1)
    dense[rows // 2] = 0
    weight = NF4Weight.pack(dense)
    if storage == "float32":
        return weight._replace(scales=BlockScales(weight.scales.values()))
    if storage == "table":
        assert weight.scales.step is not None
        table = torch.linspace(-1, 1, 256) ** 3
        return weight._replace(scales=weight.scales._replace(table=table, step=weight.scales.step * 200))
    return weight


def wanted(weight: NF4Weight, row_scales: Tensor) -> Tensor:
    out = torch.empty(weight.shape, dtype=E4M3)
    reference_fill(weight, row_scales, out)
    return out.float()


def filled(weight: NF4Weight, row_scales: Tensor, *, transposed: bool) -> Tensor:
    """In the midst of a larger matrix, the rest of which stays as it was."""
    rows, columns = weight.shape
    matrix = torch.full((columns + 32, rows + 48) if transposed else (rows + 32, columns + 48), UNTOUCHED).byte()
    inner = matrix[16:-16, 16:-32]
    nf4_fill(weight, row_scales, (inner.T if transposed else inner).view(E4M3))
    found = (inner.T if transposed else inner).view(E4M3).float()
    inner.fill_(UNTOUCHED)
    assert (matrix == UNTOUCHED).all()
    return found


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_exact(shape: tuple[int, int], storage: str, transposed: bool) -> None:
    weight = packed(*shape, storage)
    row_scales = nf4_row_scales(weight)
    assert torch.equal(filled(weight, row_scales, transposed=transposed), wanted(weight, row_scales))


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_reach_the_limit_of_their_scale(storage: str) -> None:
    weight = packed(48, 128, storage)
    row_scales = nf4_row_scales(weight)
    largest = filled(weight, row_scales, transposed=False).abs().amax(dim=1)
    reached = (largest >= LIMIT / 2) & (largest <= LIMIT)
    assert (reached | (weight.dequantise(torch.float32) == 0).all(dim=1)).all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_a_small_error_would_show(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed(130, 320)
    row_scales = nf4_row_scales(weight)
    levels = levels_on(torch.device("cpu")).clone()
    levels[9] = levels[10]
    monkeypatch.setattr(triton_kernel, "levels_on", lambda _: levels)
    assert not torch.equal(filled(weight, row_scales, transposed=transposed), wanted(weight, row_scales))


def test_what_cannot_be_filled_is_refused() -> None:
    weight = packed(16, 64)
    with pytest.raises(ValueError, match="cannot fill"):
        nf4_fill(weight, nf4_row_scales(weight), torch.empty(32, 128, dtype=E4M3)[::2, ::2])
    narrow = NF4Weight.pack(torch.randn(16, 96))
    with pytest.raises(ValueError, match="cannot fill"):
        nf4_fill(narrow, torch.ones(16), torch.empty(16, 96, dtype=E4M3))


def test_adapters_are_written_where_they_are_kept_apart_from_the_weights() -> None:
    """B and A in tensors of their own, with rows of different lengths."""
    down, up, scales = torch.randn(4, 192), torch.randn(48, 4), torch.rand(48) + 0.1

    def places() -> AdapterPlaces:
        small, wide, factor = (torch.zeros(shape, dtype=E4M3) for shape in ((48, 6), (6, 192), (4, 48)))
        return AdapterPlaces(small[:, 2:], wide[2:], scales, factor, *torch.zeros(2, 4), None)

    ours, theirs = places(), places()
    AdapterTable([Adapter(down, up, 2.0, ours)]).write()
    reference_write(down, up, 2.0, *theirs)
    assert ours[-1] is theirs[-1] is None
    for mine, reference in zip(ours[:-1], theirs[:-1], strict=True):
        assert mine is not None
        assert reference is not None
        torch.testing.assert_close(mine.float(), reference.float(), rtol=0, atol=0)
