"""LoRA adapters as matmul columns on a GPU: sums over many rows, shared between programs, and every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.lora_columns import (
    GradMatmul,
    Projection,
    adapter_gradients,
    add_columns,
    add_columns_backward,
    block_table,
    op,
    project,
    segment_table,
)
from pantheraml.kernels.lora_columns.reference import reference_gradient, reference_project
from tests.gpu.test_gpu_kernels import BOTH, GPU, left_operand, normal, powers
from tests.interpreter.comparison import assert_close
from tests.interpreter.written_adapters import SHAPES, check_written, values_of


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("shape", "offset"), [*((shape, 0) for shape in SHAPES), ("16", 1), ("24", 2), ("different", 1)]
)
@pytest.mark.parametrize("quantized", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_written_where_they_belong(shape: str, offset: int, quantized: bool, dtype: torch.dtype) -> None:
    """Also for parameters that are not aligned to a vector load, as in one flat buffer."""
    values = values_of(shape, dtype=dtype, device=GPU, offset=offset)
    check_written(shape, values, E4M3 if quantized else torch.bfloat16)


@pytest.mark.parametrize("quantized", BOTH)
@pytest.mark.parametrize("rows", [4096, 1000, 37])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 4096, 0, 48)],
        [(0, 2048, 0, 16), (2048, 1024, 16, 16), (3072, 1024, 32, 16)],
        [(0, 80, 0, 8), (112, 64, 8, 5)],
        [(0, 512, 0, 200)],
    ],
    ids=["one", "three", "odd", "large"],
)
def test_adapter_gradient(spans: list[tuple[int, int, int, int]], rows: int, quantized: bool) -> None:
    width = sum(spans[-1][:2])
    ranks, rank = sum(spans[-1][2:]), max(span[3] for span in spans)
    lora_mid = normal(rows, ranks, scale=1e-2)
    qdata = normal(rows, width + 64, scale=30.0).to(E4M3 if quantized else torch.bfloat16)
    scales = powers(rows) if quantized else None
    blocks = block_table(spans, GPU)
    ours, others, theirs = torch.zeros(3, rank, width, device=GPU)
    lefts = left_operand(lora_mid, scales), left_operand(lora_mid, None)
    matmuls = [
        GradMatmul(left, scales, qdata, blocks, rank, None, out)
        for left, out in zip(lefts, (ours, others), strict=True)
    ]
    adapter_gradients(*matmuls)
    exact = torch.zeros(rank, width, device=GPU, dtype=torch.float64)
    left = lora_mid.double() if scales is None else lora_mid.double() * scales.double()[:, None]
    for start, size, column, own in spans:
        exact[:own, start : start + size] = left[:, column : column + own].T @ qdata[:, start : start + size].double()
    assert_close(ours, exact.float(), tolerance=1e-5)
    assert_close(others, exact.float(), tolerance=1e-5)
    if rows == 37:
        reference_gradient(matmuls[1]._replace(out=theirs))
        assert_close(theirs, exact.float(), tolerance=1e-5)


@pytest.mark.parametrize("quantized", BOTH)
@pytest.mark.parametrize("ranks", [(16, 16, 16), (16, 16), (64, 8), (256, 256, 256), (512,)])
def test_both_gradients_at_once(ranks: tuple[int, ...], quantized: bool) -> None:
    """A over 4,096 columns for all ranks, and B over 2,048 for each layer."""
    rows, total = 8192, sum(ranks)
    starts = [sum(ranks[:number]) for number in range(len(ranks))]
    per_layer = [
        (2048 * number, 2048, start, rank) for number, (start, rank) in enumerate(zip(starts, ranks, strict=True))
    ]
    matmuls, expected = [], []
    for spans, rank in (([(0, 4096, 0, total)], total), (per_layer, max(ranks))):
        width = sum(spans[-1][:2])
        lora_mid, scales = normal(rows, total, scale=1e-2), powers(rows) if quantized else None
        qdata = normal(rows, width + 128, scale=30.0).to(E4M3 if quantized else torch.bfloat16)
        divisors = torch.rand(width, device=GPU) + 0.5
        out = torch.zeros(rank, width, device=GPU)
        matmuls.append(
            GradMatmul(left_operand(lora_mid, scales), scales, qdata, block_table(spans, GPU), rank, divisors, out)
        )
        exact = torch.zeros(rank, width, device=GPU, dtype=torch.float64)
        left = lora_mid.double() if scales is None else lora_mid.double() * scales.double()[:, None]
        for start, size, column, own in spans:
            columns = slice(start, start + size)
            exact[:own, columns] = left[:, column : column + own].T @ qdata[:, columns].double() / divisors[columns]
        expected.append(exact.float())
    adapter_gradients(*matmuls)
    for matmul, exact in zip(matmuls, expected, strict=True):
        assert_close(matmul.out, exact, tolerance=1e-5)


@pytest.mark.parametrize("quantized", BOTH)
@pytest.mark.parametrize("unit", [1.0, 1e4])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 4096, 0, 48)],
        [(0, 14336, 0, 16)],
        [(0, 4096, 0, 16), (4096, 1024, 16, 16), (5120, 1024, 32, 16)],
        [(0, 80, 0, 8), (112, 64, 8, 5)],
    ],
    ids=["all", "wide", "three", "odd"],
)
def test_fused_columns_match_two_steps(
    spans: list[tuple[int, int, int, int]], unit: float, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused with this many rows; in two steps when `_can_fuse` is patched."""
    rows, width, pad_cols = 8250, sum(spans[-1][:2]), 128
    ranks, rank = sum(spans[-1][2:]), max(span[3] for span in spans)
    plain, dtype = normal(rows, width), E4M3 if quantized else torch.bfloat16
    factor = normal(rank, width, scale=30.0 if quantized else 0.02).to(dtype)
    own, other = torch.rand(2, pad_cols, device=GPU) * 1e-3
    projection = Projection(factor, segment_table(spans, GPU), ranks, (own, other * unit))
    lora_mid, input_scales = normal(rows, ranks), powers(rows) if quantized else None

    def results() -> list[Tensor]:
        collected: list[Tensor] = []
        for back in BOTH:
            qdata = torch.full((rows, width + pad_cols), torch.nan, device=GPU).to(dtype)
            scales = None
            if quantized:
                qdata[:, :width], scales = reference_quantize_rows(plain)
            else:
                qdata[:, :width] = plain
            if back:
                matmuls = add_columns_backward(qdata, width, scales, projection, 0.5, lora_mid, input_scales)
                collected += [matmul.rows[:, :rows].float() / 2.0**100 for matmul in matmuls]
            else:
                collected.append(add_columns(qdata, width, scales, projection, torch.bfloat16).float())
            collected.append(qdata.float() if scales is None else qdata.float() * scales[:, None])
            collected += [] if scales is None else [scales]
        return collected

    with monkeypatch.context() as context:
        context.setattr(op, "place_columns", None)
        context.setattr(op, "place_columns_backward", None)
        at_once = results()
    monkeypatch.setattr(op, "_can_fuse", lambda *_: False)
    for fused_result, two_step_result in zip(at_once, results(), strict=True):
        assert fused_result.isfinite().all()
        torch.testing.assert_close(fused_result, two_step_result, rtol=0, atol=0)


def test_the_gradient_reads_every_code_exactly() -> None:
    codes = torch.arange(256, device=GPU)
    codes = codes[codes % 128 != 127]
    codes = torch.cat([codes, codes[:2]]).to(torch.uint8).view(E4M3)
    out = torch.zeros(1, 256, device=GPU)
    lora_mid = torch.zeros(64, 1, device=GPU, dtype=torch.bfloat16)
    lora_mid[5] = 1
    for scale in (1.0, 2.0**-60, 2.0**20):
        scales = torch.full((64,), scale, device=GPU)
        qdata, blocks = codes.expand(64, -1).contiguous(), block_table([(0, 256, 0, 1)], GPU)
        matmul = GradMatmul(left_operand(lora_mid, scales), scales, qdata, blocks, 1, None, out)
        adapter_gradients(matmul, matmul._replace(out=torch.zeros_like(out)))
        assert torch.equal(out[0], codes.float() * scale)


@pytest.mark.parametrize(("dtype", "rank"), [(torch.bfloat16, 96), (torch.bfloat16, 192), (E4M3, 256), (E4M3, 768)])
def test_projections_of_many_ranks(dtype: torch.dtype, rank: int) -> None:
    """As many as the adapters of query, key and value together."""
    rows, width = 1000, 4096
    qdata, factor = (normal(count, width, scale=1).to(dtype) for count in (rows, rank))
    segments = segment_table([(0, width, 0, rank)], GPU)
    ours, theirs = torch.full((2, rows, rank), torch.nan, device=GPU), torch.empty(1, rows, rank, device=GPU)
    project(qdata, factor, segments, rank, ours)
    reference_project(qdata, factor, segments, theirs)
    # sums of e4m3 lose bits in Hopper's tensor cores
    assert_close(ours.sum(0), theirs[0], tolerance=1e-2 if dtype == E4M3 else 2e-4)
