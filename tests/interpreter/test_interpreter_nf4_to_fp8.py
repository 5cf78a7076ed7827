"""NF4 to e4m3: bitwise equal to dequantizing, dividing and rounding, and nothing else is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, LIMIT
from pantheraml.kernels.lora_columns import Adapter, AdapterBuffers, AdapterTable
from pantheraml.kernels.lora_columns.reference import reference_write
from pantheraml.kernels.nf4.format import BlockScales, NF4Weight, levels_on
from pantheraml.kernels.nf4.to_fp8 import nf4_row_scales, nf4_to_fp8, reference_nf4_to_fp8, triton_kernel

UNTOUCHED = 0x55
SHAPES = [(16, 64), (48, 128), (130, 320), (259, 192)]
"""Fewer blocks than one program converts, and partial tiles; the last shape has several blocks of scales."""
STORAGES = ["codes", "table", "float32"]


def random_weight(rows: int, columns: int, storage: str = "codes") -> NF4Weight:
    """Rows whose magnitudes differ by up to 10x, one of them zero."""
    dense = torch.randn(rows, columns) * 10 ** torch.rand(rows, 1)
    dense[rows // 2] = 0
    weight = NF4Weight.quantize(dense)
    if storage == "float32":
        return weight._replace(scales=BlockScales(weight.scales.values()))
    if storage == "table":
        assert weight.scales.step is not None
        table = torch.linspace(-1, 1, 256) ** 3
        return weight._replace(scales=weight.scales._replace(table=table, step=weight.scales.step * 200))
    return weight


def reference_values(weight: NF4Weight, row_scales: Tensor) -> Tensor:
    out = torch.empty(weight.shape, dtype=E4M3)
    reference_nf4_to_fp8(weight, row_scales, out)
    return out.float()


def converted(weight: NF4Weight, row_scales: Tensor, *, transposed: bool) -> Tensor:
    """Write into a slice of a larger matrix, the rest of which must not change."""
    rows, columns = weight.shape
    matrix = torch.full((columns + 32, rows + 48) if transposed else (rows + 32, columns + 48), UNTOUCHED).byte()
    inner = matrix[16:-16, 16:-32]
    nf4_to_fp8(weight, row_scales, (inner.T if transposed else inner).view(E4M3))
    actual = (inner.T if transposed else inner).view(E4M3).float()
    inner.fill_(UNTOUCHED)
    assert (matrix == UNTOUCHED).all()
    return actual


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES)
def test_conversion_is_exact(shape: tuple[int, int], storage: str, transposed: bool) -> None:
    weight = random_weight(*shape, storage)
    row_scales = nf4_row_scales(weight)
    assert torch.equal(converted(weight, row_scales, transposed=transposed), reference_values(weight, row_scales))


@pytest.mark.parametrize("storage", STORAGES)
def test_row_amax_reaches_the_scale_limit(storage: str) -> None:
    weight = random_weight(48, 128, storage)
    row_scales = nf4_row_scales(weight)
    largest = converted(weight, row_scales, transposed=False).abs().amax(dim=1)
    reached = (largest >= LIMIT / 2) & (largest <= LIMIT)
    assert (reached | (weight.dequantize(torch.float32) == 0).all(dim=1)).all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
def test_small_error_is_detected(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(130, 320)
    row_scales = nf4_row_scales(weight)
    levels = levels_on(torch.device("cpu")).clone()
    levels[9] = levels[10]
    monkeypatch.setattr(triton_kernel, "levels_on", lambda _: levels)
    assert not torch.equal(converted(weight, row_scales, transposed=transposed), reference_values(weight, row_scales))


def test_unsupported_outputs_are_rejected() -> None:
    weight = random_weight(16, 64)
    with pytest.raises(ValueError, match="cannot write"):
        nf4_to_fp8(weight, nf4_row_scales(weight), torch.empty(32, 128, dtype=E4M3)[::2, ::2])
    narrow = NF4Weight.quantize(torch.randn(16, 96))
    with pytest.raises(ValueError, match="cannot write"):
        nf4_to_fp8(narrow, torch.ones(16), torch.empty(16, 96, dtype=E4M3))


def test_adapters_stored_apart_from_the_weights() -> None:
    """B and A in separate tensors, with different row strides."""
    down, up, scales = torch.randn(4, 192), torch.randn(48, 4), torch.rand(48) + 0.1

    def buffers() -> AdapterBuffers:
        small, wide, factor = (torch.zeros(shape, dtype=E4M3) for shape in ((48, 6), (6, 192), (4, 48)))
        return AdapterBuffers(small[:, 2:], wide[2:], scales, factor, *torch.zeros(2, 4))

    ours, theirs = buffers(), buffers()
    AdapterTable([Adapter(down, up, 2.0, ours)]).write()
    reference_write(down, up, 2.0, *theirs)
    for actual, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.float(), reference.float(), rtol=0, atol=0)
