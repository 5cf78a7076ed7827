"""`AdapterTable.write` for various ranks."""

from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.lora_columns import AdapterTable, triton_kernel
from tests.interpreter.written_adapters import SHAPES, allocate, check_written, values_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("element", [E4M3, torch.float32])
def test_written_buffers_match_reference(shape: str, element: torch.dtype) -> None:
    values = values_of(shape, dtype=torch.float32, device=CPU)
    check_written(shape, values, element)


@pytest.mark.parametrize("size", [256, 1024])
def test_result_does_not_depend_on_tile_size(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_WRITE_VALUES", size)
    for shape in ("16", "different"):
        check_written(shape, values_of(shape, dtype=torch.float32, device=CPU), E4M3)


def test_one_program_per_tile() -> None:
    values = values_of("16", dtype=torch.float32, device=CPU)
    _, adapters = allocate("16", values, None, torch.float32)
    tables = AdapterTable(adapters)._tables
    assert tables is not None
    assert tables.constants["TILE"] == 512
    tiles = [4 + 3, 4 + 1, 4 + 1]  # A is 1,552 wide; the B's are 1,040, 272 and 16 high
    assert tables.work.tolist() == [[number, tile] for number, count in enumerate(tiles) for tile in range(count)]
