from __future__ import annotations

import pytest
import torch

from pantheraml.parallel import consistency
from pantheraml.parallel.consistency import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64, torch.uint8]


def values(dtype: torch.dtype, count: int = 1000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(count, generator=generator) * 20).abs().to(dtype)


def number(tensor: torch.Tensor) -> int:
    return int(checksum(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = values(dtype)
    before = number(tensor)
    assert number(tensor.clone()) == before
    for place in (0, 1, 499, 999):
        for bit in (0, 3, 7):
            changed = tensor.clone()
            changed.view(torch.uint8)[place * tensor.element_size()] ^= 1 << bit
            assert number(changed) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_values_change_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.arange(200).to(dtype) if dtype != torch.float8_e4m3fn else torch.arange(16.0).to(dtype)
    before = number(tensor)
    for one, other in ((0, 1), (0, 8), (3, 13), (5, 15)):
        swapped = tensor.clone().view(torch.uint8).view(len(tensor), -1)
        swapped[[one, other]] = swapped[[other, one]].clone()
        assert number(swapped.view(-1).view(dtype)) != before


def test_checksum_is_independent_of_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(torch.float32)
    whole = number(tensor)
    for chunk in (1000, 999, 64, 7):
        monkeypatch.setattr(consistency, "CHUNK", chunk)
        assert number(tensor) == whole


def test_checksum_is_independent_of_strides() -> None:
    tensor = values(torch.float32, 12).view(3, 4)
    assert number(tensor.t()) == number(tensor.t().contiguous()) != number(tensor)


def test_signed_zeros_differ_and_empty_is_zero() -> None:
    assert number(torch.tensor(0.0)) == number(torch.empty(0)) == 0
    assert number(torch.tensor(-0.0)) != 0
    assert number(torch.full((5,), torch.nan)) != 0
