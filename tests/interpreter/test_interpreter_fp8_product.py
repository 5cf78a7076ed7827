from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.fp8_product import reference_transpose, transposed, triton_kernel


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(E4M3)  # any bytes, NaN too


def assert_transposed(source: torch.Tensor) -> None:
    found = transposed(source)
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), source.view(torch.uint8).T)
    assert torch.equal(reference_transpose(source).view(torch.uint8), source.view(torch.uint8).T)


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (16, 48), (4, 4), (1, 130), (130, 16)])
def test_every_byte_changes_places(shape: tuple[int, int]) -> None:
    assert_transposed(matrix(*shape))


def test_rows_may_be_further_apart_than_they_are_long() -> None:
    wide = matrix(150, 400)
    assert_transposed(wide[:, :260])
    assert_transposed(wide[10:90, 16:272])


def test_matrices_that_are_not_made_of_words() -> None:
    assert_transposed(matrix(40, 64)[:, 3:35])  # begins within a word
    assert_transposed(matrix(40, 66)[:, :32])  # rows do
    assert_transposed(matrix(40, 64).view(-1)[2 : 2 + 32 * 64].view(32, 64))
    assert_transposed(matrix(32, 40).T)


def test_a_small_error_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: a // b)  # forgets the tiles at the edges
    torch.manual_seed(1)  # numbers that no other test has left in memory
    with pytest.raises(AssertionError):
        assert_transposed(matrix(200, 300))
