"""Adapters of every rank in both layouts of a matrix, wherever the parameters lie."""

from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.lora_columns import AdapterTable, triton_kernel
from tests.interpreter.written_adapters import SHAPES, arranged, check_written, values_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("element", [E4M3, torch.float32])
@pytest.mark.parametrize("twice", [True, False])
def test_adapters_are_written_where_they_belong(shape: str, element: torch.dtype, twice: bool) -> None:
    values = values_of(shape, dtype=torch.float32, device=CPU)
    check_written(shape, values, element, twice=twice)


@pytest.mark.parametrize("size", [256, 1024])
def test_more_tiles_write_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_WRITE_VALUES", size)
    for shape in ("16", "different"):
        check_written(shape, values_of(shape, dtype=torch.float32, device=CPU), E4M3, twice=True)


@pytest.mark.parametrize(
    ("shape", "dtype", "offset", "steps"),
    [
        ("16", torch.float32, 0, (16, 16)),
        ("24", torch.float32, 0, (16, 8)),
        ("200", torch.float32, 4, (16, 8)),
        ("16", torch.float32, 1, (4, 16)),
        ("16", torch.bfloat16, 1, (2, 16)),
        ("different", torch.float32, 2, (8, 1)),
    ],
)
def test_kernels_are_told_how_much_they_may_load_at_once(
    shape: str, dtype: torch.dtype, offset: int, steps: tuple[int, int]
) -> None:
    """More than is so would be an error on a GPU, and only there."""
    values = values_of(shape, dtype=dtype, device=CPU, offset=offset)
    _, adapters = arranged(shape, values, torch.ones(sum(SHAPES[shape][1])), E4M3, twice=True)
    tables = AdapterTable(adapters)._tables
    assert tables is not None
    assert (tables.constants["ALONG"], tables.constants["ACROSS"]) == steps


def test_every_tile_has_one_program() -> None:
    values = values_of("16", dtype=torch.float32, device=CPU)
    _, adapters = arranged("16", values, None, torch.float32, twice=False)
    tables = AdapterTable(adapters)._tables
    assert tables is not None
    assert tables.constants["TILE"] == 512
    tiles = [4 + 3, 4 + 1, 4 + 1]  # of A, 1,552 wide, and of B: 1,040, 272 and 16 high
    assert tables.work.tolist() == [[number, tile] for number, count in enumerate(tiles) for tile in range(count)]
