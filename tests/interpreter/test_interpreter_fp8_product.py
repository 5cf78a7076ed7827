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


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (16, 48), (1, 130)])
def test_every_byte_changes_places(shape: tuple[int, int]) -> None:
    assert_transposed(matrix(*shape))


def test_rows_may_be_further_apart_than_they_are_long() -> None:
    wide = matrix(150, 400)
    assert_transposed(wide[:, :260])
    assert_transposed(wide[10:90, 16:272])


def test_a_small_error_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: a // b)  # forgets the tiles at the edges
    with pytest.raises(AssertionError):
        assert_transposed(matrix(200, 300))
