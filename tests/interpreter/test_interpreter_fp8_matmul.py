from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.matmul import reference_transpose, transposed, triton_kernel


def random_bytes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(E4M3)  # any bytes, including NaN


def check_transpose(source: torch.Tensor) -> None:
    actual = transposed(source)
    assert actual.is_contiguous()
    assert torch.equal(actual.view(torch.uint8), source.view(torch.uint8).T)
    assert torch.equal(reference_transpose(source).view(torch.uint8), source.view(torch.uint8).T)


@pytest.mark.parametrize("shape", [(128, 256), (200, 300), (16, 48), (4, 4), (1, 130), (130, 16)])
def test_transpose_matches_reference(shape: tuple[int, int]) -> None:
    check_transpose(random_bytes(*shape))


def test_strided_rows() -> None:
    wide = random_bytes(150, 400)
    check_transpose(wide[:, :260])
    check_transpose(wide[10:90, 16:272])


def test_matrices_not_aligned_to_words() -> None:
    check_transpose(random_bytes(40, 64)[:, 3:35])  # starts inside a word
    check_transpose(random_bytes(40, 66)[:, :32])  # row stride is not a multiple of a word
    check_transpose(random_bytes(40, 64).view(-1)[2 : 2 + 32 * 64].view(32, 64))
    check_transpose(random_bytes(32, 40).T)


def test_small_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "ceil_div", lambda a, b: a // b)  # skips the tiles at the edges
    torch.manual_seed(1)  # values that no other test has left in freed memory
    with pytest.raises(AssertionError):
        check_transpose(random_bytes(200, 300))
