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


def test_every_tile_has_one_program() -> None:
    values = values_of("16", dtype=torch.float32, device=CPU)
    _, adapters = arranged("16", values, None, torch.float32, twice=False)
    tables = AdapterTable(adapters)._tables
    assert tables is not None
    assert tables.constants["TILE"] == 512
    tiles = [4 + 3, 4 + 1, 4 + 1]  # of A, 1,552 wide, and of B: 1,040, 272 and 16 high
    assert tables.work.tolist() == [[number, tile] for number, count in enumerate(tiles) for tile in range(count)]
