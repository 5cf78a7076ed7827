"""LoRA columns of three merged layers with different heights, ranks and scalings, one of them without an adapter."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, E4M3_MAX
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.lora_columns import (
    Adapter,
    AdapterBuffers,
    AdapterTable,
    GradMatmul,
    LeftOperand,
    Projection,
    adapter_gradients,
    add_columns,
    add_columns_backward,
    block_table,
    place_columns,
    place_columns_backward,
    project,
    segment_table,
    triton_gradient,
    triton_kernel,
)
from pantheraml.kernels.lora_columns.reference import (
    PRESCALE,
    reference_gradient,
    reference_left_operand,
    reference_place,
    reference_project,
    reference_write,
)
from tests.interpreter.comparison import ULPS, assert_close, assert_same_codes

CPU = torch.device("cpu")
WIDTH, PAD_COLS, ROWS = 160, 128, 37
HEIGHTS, RANKS, SCALINGS = (48, 32, 80), (8, 0, 5), (2.0, 0.0, 0.5)
HEIGHT, ALL_RANKS, RANK = sum(HEIGHTS), sum(RANKS), max(RANKS)
STARTS, COLUMNS = (0, 48, 80), (0, 8, 8)
SEGMENTS = [
    (start, height, column, rank)
    for start, height, column, rank in zip(STARTS, HEIGHTS, COLUMNS, RANKS, strict=True)
    if rank
]
WHOLE = [(0, WIDTH, 0, ALL_RANKS)]


class Written(NamedTuple):
    """Buffers that writing adapters changes."""

    matrix: Tensor
    up: Tensor
    scale_down: Tensor
    scale_up: Tensor
    matrix_t: Tensor


def parameters() -> list[tuple[Tensor, Tensor]]:
    """A and B of each adapter; one row of A is zero, and one column of B, as at the start of training."""
    values = [(0.1 * torch.randn(rank, WIDTH), 0.05 * torch.randn(height, rank)) for _, height, _, rank in SEGMENTS]
    values[0][0][3] = 0
    values[1][1][:, 2] = 0
    return values


def make_adapters(values: list[tuple[Tensor, Tensor]], scales: Tensor | None) -> tuple[Written, list[Adapter]]:
    dtype = torch.float32 if scales is None else E4M3
    matrix = torch.zeros(HEIGHT + PAD_COLS, WIDTH + PAD_COLS).to(dtype)
    matrix_t = torch.zeros(WIDTH, HEIGHT + PAD_COLS).to(dtype)
    written = Written(matrix, torch.zeros(RANK, HEIGHT).to(dtype), *torch.zeros(2, PAD_COLS), matrix_t)
    adapters = []
    scalings = [scaling for scaling, rank in zip(SCALINGS, RANKS, strict=True) if rank]
    for (start, height, column, rank), (down, up), scaling in zip(SEGMENTS, values, scalings, strict=True):
        rows, ranks = slice(start, start + height), slice(column, column + rank)
        buffers = AdapterBuffers(
            matrix_up=matrix[rows, WIDTH + column : WIDTH + column + rank],
            matrix_down=matrix[HEIGHT + column : HEIGHT + column + rank, :WIDTH],
            scales=None if scales is None else scales[rows],
            factor_up=written.up[:rank, rows],
            scale_down=written.scale_down[ranks],
            scale_up=written.scale_up[ranks],
            matrix_down_t=matrix_t[:, HEIGHT + column : HEIGHT + column + rank],
        )
        adapters.append(Adapter(down, up, scaling, buffers))
    return written, adapters


def check_write(*, quantized: bool, error: float = 0.0) -> None:
    values = parameters()
    scales = torch.rand(HEIGHT) + 0.5 if quantized else None
    ours, adapters = make_adapters([(down + error, up) for down, up in values], scales)
    AdapterTable(adapters).write()
    theirs, adapters = make_adapters(values, scales)
    for down, up, scaling, buffers in adapters:
        reference_write(down, up, scaling, *buffers)
    assert torch.equal(
        ours.matrix_t.float(), torch.cat([torch.zeros(HEIGHT, WIDTH), ours.matrix[HEIGHT:, :WIDTH].float()]).T
    )
    if quantized:
        assert_same_codes(ours.matrix, theirs.matrix)
        assert torch.equal(ours.up[:, :48].float(), ours.matrix[:48, WIDTH : WIDTH + 8].float().T)
        assert_same_codes(ours.up, theirs.up)
        torch.testing.assert_close(ours.scale_down, theirs.scale_down, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.scale_up, theirs.scale_up, rtol=1e-6, atol=0)
    else:
        assert torch.equal(ours.matrix, theirs.matrix)
        assert torch.equal(ours.up, theirs.up)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("values", [8192, 8 * 64, 8 * 16])
def test_write(quantized: bool, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_WRITE_VALUES", values)
    check_write(quantized=quantized)


@pytest.mark.parametrize("quantized", [True, False])
def test_place_with_fewer_rows_per_program(quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_TILE", 8 * 32)  # as with a rank of 512
    check_place(quantized=quantized)


def test_second_write_replaces_the_first() -> None:
    values, scales = parameters(), torch.rand(HEIGHT) + 0.5
    ours, adapters = make_adapters(values, scales)
    table = AdapterTable(adapters)
    table.write()
    for down, up in values:
        down.mul_(0.01)
        up.mul_(0.01)
    table.write()
    fresh, adapters = make_adapters(values, scales)
    AdapterTable(adapters).write()
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, fresh, strict=True))


def test_nan_adapter_has_nan_scale() -> None:
    values, scales = parameters(), torch.rand(HEIGHT) + 0.5
    values[0][0][2, 7] = values[1][1][9, 1] = torch.nan
    ours, adapters = make_adapters(values, scales)
    AdapterTable(adapters).write()
    assert ours.scale_down.isnan().nonzero().tolist() == [[2]]
    assert ours.scale_up.isnan().nonzero().tolist() == [[8 + 1]]


def rows_of(width: int, *, quantized: bool) -> tuple[Tensor, Tensor | None]:
    if not quantized:
        return torch.randn(ROWS, width + PAD_COLS), None
    qdata = torch.zeros(ROWS, width + PAD_COLS).to(E4M3)
    qdata[:, :width], scales = reference_quantize_rows(torch.randn(ROWS, width) * torch.rand(ROWS, 1))
    return qdata, scales


def factor_of(rank: int, width: int, *, quantized: bool) -> Tensor:
    return (50 * torch.randn(rank, width)).to(E4M3) if quantized else torch.randn(rank, width)


def check_project(*, quantized: bool, backward: bool, splits: int) -> Tensor:
    """Forward: all columns from the whole row. Backward: each layer's columns from its segment of the row."""
    width, layout, rank = (HEIGHT, SEGMENTS, RANK) if backward else (WIDTH, WHOLE, ALL_RANKS)
    qdata, _ = rows_of(width, quantized=quantized)
    factor = factor_of(rank, width, quantized=quantized)
    segments = segment_table(layout, CPU)
    ours, theirs = torch.full((splits, ROWS, ALL_RANKS), torch.nan), torch.empty(1, ROWS, ALL_RANKS)
    project(qdata, factor, segments, rank, ours)
    reference_project(qdata, factor, segments, theirs)
    assert_close(ours.sum(0), theirs[0])
    return ours


@pytest.mark.parametrize(("quantized", "backward", "splits"), itertools.product((True, False), (True, False), (1, 3)))
def test_project(quantized: bool, backward: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "PROJECT_ROWS", 16)
    monkeypatch.setattr(triton_kernel, "_PROJECT_BYTES", 64)
    monkeypatch.setattr(triton_kernel, "_PROJECT_RANKS", 16)
    check_project(quantized=quantized, backward=backward, splits=splits)


def check_place(*, quantized: bool, magnitude: float = 1.0, error: float = 1.0, backward: bool = False) -> Tensor:
    """Compare with the reference and return the final row scales; `magnitude` scales the columns."""
    qdata, scales = rows_of(WIDTH, quantized=quantized)
    raw = torch.randn(3, ROWS, ALL_RANKS) * 10 ** torch.linspace(-1, 1, ROWS)[:, None]
    factor_scales, matrix_scales = torch.rand(2, PAD_COLS) + 0.5
    matrix_scales = matrix_scales * magnitude
    before = qdata.clone(), None if scales is None else scales.clone()
    expected = torch.empty(ROWS, ALL_RANKS)
    reference_place(raw, factor_scales, matrix_scales, before[0], WIDTH, before[1], expected)
    if backward:
        saved_mid, input_scales = torch.randn(ROWS, ALL_RANKS), torch.rand(ROWS) if quantized else None
        down, up = place_columns_backward(
            raw * error, (factor_scales, matrix_scales), qdata, WIDTH, scales, 0.5, saved_mid, input_scales
        )
        assert (down.prescaled, up.prescaled) == (quantized, quantized)
        check_left_operand(down, expected * 0.5, input_scales)
        check_left_operand(up, saved_mid, scales)
    else:
        lora_mid = place_columns(raw * error, (factor_scales, matrix_scales), qdata, WIDTH, scales, torch.float32)
        assert_close(lora_mid, expected)
    if scales is None or before[1] is None:
        assert_close(qdata, before[0])
        return torch.zeros(ROWS)
    assert torch.equal(scales, before[1]), "scales change by powers of two, so they must be equal"
    assert_same_codes(qdata, before[0])
    assert (qdata[:, WIDTH + ALL_RANKS :].float() == 0).all()
    columns = qdata[:, WIDTH : WIDTH + ALL_RANKS].float() * scales[:, None]
    assert_near(columns, expected * matrix_scales[:ALL_RANKS], scales)
    return scales


def check_left_operand(actual: LeftOperand, lora_mid: Tensor, row_scales: Tensor | None) -> None:
    assert actual.rows.shape[1] % 64 == 0
    expected = lora_mid.T if row_scales is None else lora_mid.T * row_scales * PRESCALE
    assert_close(actual.rows[:, :ROWS] / PRESCALE, expected / PRESCALE)


def left_operand(lora_mid: Tensor, row_scales: Tensor | None) -> LeftOperand:
    rows = torch.full((lora_mid.shape[1], -(-lora_mid.shape[0] // 64) * 64), torch.nan)
    reference_left_operand(lora_mid, row_scales, rows)
    return LeftOperand(rows, prescaled=row_scales is not None)


def assert_near(actual: Tensor, expected: Tensor, scales: Tensor) -> None:
    """Nothing was clamped: every value is within half an e4m3 step of the expected one."""
    assert ((actual - expected).abs() <= expected.abs() / 16 * 1.001 + scales[:, None] * 2**-10).all()


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("rows", [32, 16])
def test_place(quantized: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PLACE_ROWS", rows)
    check_place(quantized=quantized)
    check_place(quantized=quantized, backward=True)


def test_left_operand_without_input_scales_is_not_prescaled() -> None:
    qdata, scales = rows_of(WIDTH, quantized=True)
    raw, ones = torch.randn(1, ROWS, ALL_RANKS), (torch.ones(PAD_COLS), torch.ones(PAD_COLS))
    assert scales is not None
    expected = raw[0].T * scales
    down, up = place_columns_backward(raw, ones, qdata, WIDTH, scales, 1.0, torch.ones(ROWS, ALL_RANKS), None)
    assert (down.prescaled, up.prescaled) == (False, True)
    assert_close(down.rows[:, :ROWS], expected)


def test_columns_beyond_e4m3_rescale_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PLACE_CHUNK", 64)
    qdata, scales = rows_of(WIDTH, quantized=True)
    assert scales is not None
    before = qdata[:, :WIDTH].float() * scales[:, None]
    old = scales.clone()
    raw = torch.ones(1, ROWS, ALL_RANKS)
    raw[0, :, 4] = 10 ** torch.linspace(0, 5, ROWS)
    place_columns(raw, (torch.ones(PAD_COLS), torch.ones(PAD_COLS)), qdata, WIDTH, scales, torch.float32)
    rescale = scales / old
    expected = torch.exp2((raw[0, :, 4] / E4M3_MAX).log2().ceil()).clamp(min=1)
    assert torch.equal(rescale, expected)
    assert (rescale == 1).any()
    assert (rescale >= 256).any()
    after = qdata[:, :WIDTH].float() * scales[:, None]
    assert torch.equal(after[rescale == 1], before[rescale == 1])
    assert_near(after, before, scales)
    assert_near(qdata[:, WIDTH : WIDTH + ALL_RANKS].float() * scales[:, None], raw[0] * old[:, None], scales)


@pytest.mark.parametrize("magnitude", [30.0, 3000.0])
def test_place_matches_reference_for_rescaled_rows(magnitude: float) -> None:
    check_place(quantized=True, magnitude=magnitude)
    check_place(quantized=True, magnitude=magnitude, backward=True)


def check_columns(*, quantized: bool, backward: bool, magnitude: float = 1.0, error: float = 1.0) -> None:
    """Compare `add_columns` with the references of projecting and placing."""
    width, layout, rank = (HEIGHT, SEGMENTS, RANK) if backward else (WIDTH, WHOLE, ALL_RANKS)
    qdata, scales = rows_of(width, quantized=quantized)
    factor, segments = factor_of(rank, width, quantized=quantized), segment_table(layout, CPU)
    factor_scales, matrix_scales = torch.rand(2, PAD_COLS) * 1e-3
    expected, expected_scales = qdata.clone(), None if scales is None else scales.clone()
    raw, lora_mid = torch.empty(1, ROWS, ALL_RANKS), torch.empty(ROWS, ALL_RANKS)
    reference_project(qdata, factor, segments, raw)
    reference_place(raw, factor_scales, matrix_scales * magnitude, expected, width, expected_scales, lora_mid)
    factor = factor if quantized else factor * error
    projection = Projection(factor, segments, ALL_RANKS, (factor_scales * error, matrix_scales * magnitude))
    if backward:
        saved_mid, input_scales = torch.randn(ROWS, ALL_RANKS), torch.rand(ROWS) if quantized else None
        down, up = add_columns_backward(qdata, width, scales, projection, 0.5, saved_mid, input_scales)
        assert (down.prescaled, up.prescaled) == (quantized, quantized)
        check_left_operand(down, lora_mid * 0.5, input_scales)
        check_left_operand(up, saved_mid, expected_scales)
    else:
        assert_close(add_columns(qdata, width, scales, projection, torch.float32), lora_mid)
    if scales is None or expected_scales is None:
        assert_close(qdata, expected)
        return
    assert torch.equal(scales, expected_scales)
    assert_same_codes(qdata, expected)


@pytest.mark.parametrize(("quantized", "backward"), itertools.product((True, False), (True, False)))
def test_fused_project_and_place(quantized: bool, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "PROJECT_ROWS", 16)
    monkeypatch.setattr(triton_kernel, "_PROJECT_BYTES", 64)
    monkeypatch.setattr(triton_kernel, "place", None)  # used only by the unfused path
    check_columns(quantized=quantized, backward=backward)
    if quantized:
        check_columns(quantized=True, backward=backward, magnitude=1e6)
    with pytest.raises(AssertionError):
        check_columns(quantized=quantized, backward=backward, error=1.001)


@pytest.mark.parametrize("backward", [True, False])
def test_many_ranks_use_two_kernels(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PROJECT_RANKS", 8)
    monkeypatch.setattr(triton_kernel, "project_and_place", None)
    check_columns(quantized=True, backward=backward)


def check_gradients(*, quantized: bool, rows: int = ROWS, error: float = 1.0, prescaled: bool = True) -> None:
    """Gradient of A: all ranks over the input's width. Of B: each layer's ranks over its segment, transposed, with
    divisors."""
    actual, expected = [], []
    for up in (False, True):
        width, layout, rank = (HEIGHT, SEGMENTS, RANK) if up else (WIDTH, WHOLE, ALL_RANKS)
        lora_mid = torch.randn(rows, ALL_RANKS)
        qdata = (20 * torch.randn(rows, width + PAD_COLS)).to(E4M3 if quantized else torch.float32)
        scales = torch.rand(rows) if quantized else None
        divisors = torch.rand(width) + 0.5 if up else None
        ours, theirs = torch.full((2, width, rank) if up else (2, rank, width), 7.0)
        left = left_operand(lora_mid * (error if up else 1.0), scales if prescaled or up else None)
        others = scales, qdata, block_table(layout, CPU), rank, divisors
        actual.append(GradMatmul(left, *others, ours.T if up else ours))
        expected.append(GradMatmul(left_operand(lora_mid, None), *others, theirs.T if up else theirs))
    adapter_gradients(*actual)
    for matmul in expected:
        reference_gradient(matmul)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours.out, theirs.out, tolerance=max(1.0, (rows / 100) ** 0.5) * ULPS)


@pytest.mark.seed("S4-161")
@pytest.mark.parametrize("quantized", [True, False])
def test_gradients(quantized: bool) -> None:
    check_gradients(quantized=quantized)


def test_gradients_with_one_left_operand_not_prescaled() -> None:
    check_gradients(quantized=True, prescaled=False)


@pytest.mark.parametrize("quantized", [True, False])
def test_gradients_with_several_splits(quantized: bool) -> None:
    check_gradients(quantized=quantized, rows=700)


@pytest.mark.parametrize("quantized", [True, False])
def test_gradients_with_several_tiles_per_block(quantized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gradient, "_MAX_ACCUMULATORS", 16 * 64)  # as with a rank of 256
    check_gradients(quantized=quantized)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("ranks", [4, 8, 12])
def test_gradients_of_more_ranks_than_one_launch(quantized: bool, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gradient, "_MAX_RANKS", ranks)
    check_gradients(quantized=quantized)


def gradient_of_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Gradient of one rank over two rows of these e4m3 codes; the left operand is 1 in the first row and 0 in the
    second."""
    qdata = codes.to(torch.uint8).view(E4M3).expand(2, -1).contiguous()
    left, blocks = left_operand(torch.tensor([[1.0], [0.0]]), scales), block_table([(0, codes.numel(), 0, 1)], CPU)
    matmuls = [GradMatmul(left, scales, qdata, blocks, 1, None, torch.empty(1, codes.numel())) for _ in range(2)]
    adapter_gradients(*matmuls)
    torch.testing.assert_close(matmuls[0].out, matmuls[1].out, rtol=0, atol=0, equal_nan=True)
    return matmuls[0].out[0]


def test_gradient_reads_every_code_exactly() -> None:
    codes = torch.arange(256)[torch.arange(256) % 128 != 127]
    codes = torch.cat([codes, codes[:2]])  # a multiple of 16
    for scale in (1.0, 2.0**-60, 2.0**20):
        assert torch.equal(
            gradient_of_codes(codes, torch.full((2,), scale)), codes.to(torch.uint8).view(E4M3).float() * scale
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity times zero
@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
@pytest.mark.parametrize("code", [0x7F, 0x00, 0x7E])
def test_nonfinite_row_scale_reaches_the_gradient(scale: float, code: int) -> None:
    """A row that contains NaN or infinity has that value as its scale (see `quantize_rows`)."""
    actual = gradient_of_codes(torch.full((32,), code), torch.tensor([scale, 1.0]))
    assert not actual.isfinite().any()


def test_gradient_does_not_write_outside_its_blocks() -> None:
    left, qdata, blocks = (
        left_operand(torch.randn(ROWS, ALL_RANKS), None),
        torch.randn(ROWS, HEIGHT),
        block_table(SEGMENTS, CPU),
    )
    matmuls = [GradMatmul(left, None, qdata, blocks, RANK, None, torch.full((RANK, HEIGHT), 7.0)) for _ in range(2)]
    adapter_gradients(*matmuls)
    for matmul in matmuls:
        assert (matmul.out[:, STARTS[1] : STARTS[2]] == 7).all()
        assert (matmul.out[RANKS[2] :, STARTS[2] :] == 7).all()
        assert (matmul.out[: RANKS[0], : HEIGHTS[0]] != 7).all()


def test_small_error_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    for quantized in (True, False):
        with pytest.raises(AssertionError):
            check_write(quantized=quantized, error=1e-3)
        with pytest.raises(AssertionError):
            check_place(quantized=quantized, error=1.0001)
        with pytest.raises(AssertionError):
            check_gradients(quantized=quantized, error=1.0001)
    with pytest.raises(AssertionError):
        monkeypatch.setattr(triton_kernel, "E4M3_MAX", tl.constexpr(447.0))
        check_write(quantized=True)


def test_truncated_projection_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [(0, WIDTH - 16, 0, ALL_RANKS)]
    monkeypatch.setattr(triton_kernel, "_PROJECT_BYTES", 64)
    qdata, _ = rows_of(WIDTH, quantized=False)
    factor = factor_of(ALL_RANKS, WIDTH, quantized=False)
    ours, theirs = torch.empty(1, ROWS, ALL_RANKS), torch.empty(1, ROWS, ALL_RANKS)
    project(qdata, factor, segment_table(layout, CPU), ALL_RANKS, ours)
    reference_project(qdata, factor, segment_table(WHOLE, CPU), theirs)
    with pytest.raises(AssertionError):
        assert_close(ours[0], theirs[0])
