"""Adapters as columns of products, on a real GPU: sums over many rows, which programs share, and every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.lora_columns import (
    Projection,
    Side,
    adapter_gradients,
    add_columns,
    add_columns_back,
    blocks_of,
    op,
    project,
    segments_of,
)
from pantheraml.kernels.lora_columns.reference import reference_gradient, reference_project
from pantheraml.kernels.quantise_rows import reference_quantise_rows
from tests.gpu.test_gpu_kernels import BOTH, GPU, left_of, normal, powers
from tests.interpreter.comparison import assert_close
from tests.interpreter.written_adapters import SHAPES, check_written, values_of


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 products need compute capability 9.0")
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("shape", "offset"), [*((shape, 0) for shape in SHAPES), ("16", 1), ("24", 2), ("different", 1)]
)
@pytest.mark.parametrize("quantised", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_written_where_they_belong(shape: str, offset: int, quantised: bool, dtype: torch.dtype) -> None:
    """Also where parameters begin at no multiple of what is loaded at once, as in one flat piece of memory."""
    values = values_of(shape, dtype=dtype, device=GPU, offset=offset)
    for twice in BOTH:
        check_written(shape, values, E4M3 if quantised else torch.bfloat16, twice=twice)


@pytest.mark.parametrize("quantised", BOTH)
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
def test_adapter_gradient(spans: list[tuple[int, int, int, int]], rows: int, quantised: bool) -> None:
    width = sum(spans[-1][:2])
    ranks, rank = sum(spans[-1][2:]), max(span[3] for span in spans)
    middle = normal(rows, ranks, scale=1e-2)
    payload = normal(rows, width + 64, scale=30.0).to(E4M3 if quantised else torch.bfloat16)
    scales = powers(rows) if quantised else None
    blocks = blocks_of(spans, GPU)
    ours, others, theirs = torch.zeros(3, rank, width, device=GPU)
    lefts = left_of(middle, scales), left_of(middle, None)
    sides = [
        Side(left, scales, payload, blocks, rank, None, out) for left, out in zip(lefts, (ours, others), strict=True)
    ]
    adapter_gradients(*sides)
    exact = torch.zeros(rank, width, device=GPU, dtype=torch.float64)
    left = middle.double() if scales is None else middle.double() * scales.double()[:, None]
    for start, size, column, own in spans:
        exact[:own, start : start + size] = left[:, column : column + own].T @ payload[:, start : start + size].double()
    assert_close(ours, exact.float(), tolerance=1e-5)
    assert_close(others, exact.float(), tolerance=1e-5)
    if rows == 37:
        reference_gradient(sides[1]._replace(out=theirs))
        assert_close(theirs, exact.float(), tolerance=1e-5)


@pytest.mark.parametrize("quantised", BOTH)
@pytest.mark.parametrize("ranks", [(16, 16, 16), (16, 16), (64, 8), (256, 256, 256), (512,)])
def test_both_gradients_at_once(ranks: tuple[int, ...], quantised: bool) -> None:
    """Of A over 4,096 columns, of all ranks, and of B over 2,048 for each layer."""
    rows, total = 8192, sum(ranks)
    starts = [sum(ranks[:number]) for number in range(len(ranks))]
    pieces = [
        (2048 * number, 2048, start, rank) for number, (start, rank) in enumerate(zip(starts, ranks, strict=True))
    ]
    sides, wanted = [], []
    for spans, rank in (([(0, 4096, 0, total)], total), (pieces, max(ranks))):
        width = sum(spans[-1][:2])
        middle, scales = normal(rows, total, scale=1e-2), powers(rows) if quantised else None
        payload = normal(rows, width + 128, scale=30.0).to(E4M3 if quantised else torch.bfloat16)
        divisors = torch.rand(width, device=GPU) + 0.5
        out = torch.zeros(rank, width, device=GPU)
        sides.append(Side(left_of(middle, scales), scales, payload, blocks_of(spans, GPU), rank, divisors, out))
        exact = torch.zeros(rank, width, device=GPU, dtype=torch.float64)
        left = middle.double() if scales is None else middle.double() * scales.double()[:, None]
        for start, size, column, own in spans:
            columns = slice(start, start + size)
            exact[:own, columns] = left[:, column : column + own].T @ payload[:, columns].double() / divisors[columns]
        wanted.append(exact.float())
    adapter_gradients(*sides)
    for side, exact in zip(sides, wanted, strict=True):
        assert_close(side.out, exact, tolerance=1e-5)


@pytest.mark.parametrize("quantised", BOTH)
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
def test_columns_in_one_go_are_those_of_two_steps(
    spans: list[tuple[int, int, int, int]], unit: float, quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one go where there are so many rows; the other way when it is told that they are too few."""
    rows, width, room = 8250, sum(spans[-1][:2]), 128
    ranks, rank = sum(spans[-1][2:]), max(span[3] for span in spans)
    plain, dtype = normal(rows, width), E4M3 if quantised else torch.bfloat16
    factor = normal(rank, width, scale=30.0 if quantised else 0.02).to(dtype)
    own, other = torch.rand(2, room, device=GPU) * 1e-3
    projection = Projection(factor, segments_of(spans, GPU), ranks, (own, other * unit))
    kept, input_scales = normal(rows, ranks), powers(rows) if quantised else None

    def results() -> list[Tensor]:
        found: list[Tensor] = []
        for back in BOTH:
            payload = torch.full((rows, width + room), torch.nan, device=GPU).to(dtype)
            scales = None
            if quantised:
                payload[:, :width], scales = reference_quantise_rows(plain)
            else:
                payload[:, :width] = plain
            if back:
                sides = add_columns_back(payload, width, scales, projection, 0.5, kept, input_scales)
                found += [side.rows[:, :rows].float() / 2.0**100 for side in sides]
            else:
                found.append(add_columns(payload, width, scales, projection, torch.bfloat16).float())
            found.append(payload.float() if scales is None else payload.float() * scales[:, None])
            found += [] if scales is None else [scales]
        return found

    with monkeypatch.context() as context:
        context.setattr(op, "place_columns", None)
        context.setattr(op, "place_columns_back", None)
        at_once = results()
    monkeypatch.setattr(op, "_in_one_go", lambda *_: False)
    for here, there in zip(at_once, results(), strict=True):
        assert here.isfinite().all()
        torch.testing.assert_close(here, there, rtol=0, atol=0)


def test_the_gradient_reads_every_code_exactly() -> None:
    codes = torch.arange(256, device=GPU)
    codes = codes[codes % 128 != 127]
    codes = torch.cat([codes, codes[:2]]).to(torch.uint8).view(E4M3)
    out = torch.zeros(1, 256, device=GPU)
    middle = torch.zeros(64, 1, device=GPU, dtype=torch.bfloat16)
    middle[5] = 1
    for scale in (1.0, 2.0**-60, 2.0**20):
        scales = torch.full((64,), scale, device=GPU)
        payload, blocks = codes.expand(64, -1).contiguous(), blocks_of([(0, 256, 0, 1)], GPU)
        side = Side(left_of(middle, scales), scales, payload, blocks, 1, None, out)
        adapter_gradients(side, side._replace(out=torch.zeros_like(out)))
        assert torch.equal(out[0], codes.float() * scale)


@pytest.mark.parametrize(("dtype", "rank"), [(torch.bfloat16, 96), (torch.bfloat16, 192), (E4M3, 256), (E4M3, 768)])
def test_projections_of_many_ranks(dtype: torch.dtype, rank: int) -> None:
    """As many as the adapters of query, key and value have together."""
    rows, width = 1000, 4096
    payload, factor = (normal(count, width, scale=1).to(dtype) for count in (rows, rank))
    segments = segments_of([(0, width, 0, rank)], GPU)
    ours, theirs = torch.full((2, rows, rank), torch.nan, device=GPU), torch.empty(1, rows, rank, device=GPU)
    project(payload, factor, segments, rank, ours)
    reference_project(payload, factor, segments, theirs)
    # sums of e4m3 lose bits in Hopper's tensor cores
    assert_close(ours.sum(0), theirs[0], tolerance=1e-2 if dtype == E4M3 else 2e-4)
