"""A merged layer of three, as fused products have it: different heights, ranks and scalings, one without adapter."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, LARGEST
from pantheraml.kernels.lora_columns import (
    Adapter,
    AdapterPlaces,
    AdapterTable,
    Left,
    Projection,
    Side,
    adapter_gradients,
    add_columns,
    add_columns_back,
    blocks_of,
    place_columns,
    place_columns_back,
    project,
    segments_of,
    triton_gradient,
    triton_kernel,
)
from pantheraml.kernels.lora_columns.reference import (
    LIFT,
    reference_gradient,
    reference_left,
    reference_place,
    reference_project,
    reference_write,
)
from pantheraml.kernels.quantise_rows import reference_quantise_rows
from tests.interpreter.comparison import ULPS, assert_close, assert_same_codes

CPU = torch.device("cpu")
WIDTH, ROOM, ROWS = 160, 128, 37
HEIGHTS, RANKS, SCALINGS = (48, 32, 80), (8, 0, 5), (2.0, 0.0, 0.5)
HEIGHT, ALL_RANKS, RANK = sum(HEIGHTS), sum(RANKS), max(RANKS)
STARTS, COLUMNS = (0, 48, 80), (0, 8, 8)
PIECES = [
    (start, height, column, rank)
    for start, height, column, rank in zip(STARTS, HEIGHTS, COLUMNS, RANKS, strict=True)
    if rank
]
WHOLE = [(0, WIDTH, 0, ALL_RANKS)]


class Written(NamedTuple):
    """What writing adapters changes."""

    matrix: Tensor
    up: Tensor
    unit_down: Tensor
    unit_up: Tensor
    turned: Tensor


def parameters() -> list[tuple[Tensor, Tensor]]:
    """A and B of each adapter; one row of A is nought, as a column of B is at the start of training."""
    found = [(0.1 * torch.randn(rank, WIDTH), 0.05 * torch.randn(height, rank)) for _, height, _, rank in PIECES]
    found[0][0][3] = 0
    found[1][1][:, 2] = 0
    return found


def table(values: list[tuple[Tensor, Tensor]], scales: Tensor | None) -> tuple[Written, list[Adapter]]:
    dtype = torch.float32 if scales is None else E4M3
    matrix = torch.zeros(HEIGHT + ROOM, WIDTH + ROOM).to(dtype)
    turned = torch.zeros(WIDTH, HEIGHT + ROOM).to(dtype)
    written = Written(matrix, torch.zeros(RANK, HEIGHT).to(dtype), *torch.zeros(2, ROOM), turned)
    adapters = []
    scalings = [scaling for scaling, rank in zip(SCALINGS, RANKS, strict=True) if rank]
    for (start, height, column, rank), (down, up), scaling in zip(PIECES, values, scalings, strict=True):
        rows, ranks = slice(start, start + height), slice(column, column + rank)
        places = AdapterPlaces(
            matrix_up=matrix[rows, WIDTH + column : WIDTH + column + rank],
            matrix_down=matrix[HEIGHT + column : HEIGHT + column + rank, :WIDTH],
            scales=None if scales is None else scales[rows],
            factor_up=written.up[:rank, rows],
            unit_down=written.unit_down[ranks],
            unit_up=written.unit_up[ranks],
            turned_down=turned[:, HEIGHT + column : HEIGHT + column + rank],
        )
        adapters.append(Adapter(down, up, scaling, places))
    return written, adapters


def check_write(*, quantised: bool, error: float = 0.0) -> None:
    values = parameters()
    scales = torch.rand(HEIGHT) + 0.5 if quantised else None
    ours, adapters = table([(down + error, up) for down, up in values], scales)
    AdapterTable(adapters).write()
    theirs, adapters = table(values, scales)
    for down, up, scaling, places in adapters:
        reference_write(down, up, scaling, *places)
    assert torch.equal(
        ours.turned.float(), torch.cat([torch.zeros(HEIGHT, WIDTH), ours.matrix[HEIGHT:, :WIDTH].float()]).T
    )
    if quantised:
        assert_same_codes(ours.matrix, theirs.matrix)
        assert torch.equal(ours.up[:, :48].float(), ours.matrix[:48, WIDTH : WIDTH + 8].float().T)
        assert_same_codes(ours.up, theirs.up)
        torch.testing.assert_close(ours.unit_down, theirs.unit_down, rtol=1e-6, atol=0)
        torch.testing.assert_close(ours.unit_up, theirs.unit_up, rtol=1e-6, atol=0)
    else:
        assert torch.equal(ours.matrix, theirs.matrix)
        assert torch.equal(ours.up, theirs.up)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("values", [8192, 8 * 64, 8 * 16])
def test_write(quantised: bool, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_WRITE_VALUES", values)
    check_write(quantised=quantised)


@pytest.mark.parametrize("quantised", [True, False])
def test_place_with_fewer_rows_at_once(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_TILE", 8 * 32)  # as with a rank of 512
    check_place(quantised=quantised)


def test_a_second_write_forgets_the_first() -> None:
    values, scales = parameters(), torch.rand(HEIGHT) + 0.5
    ours, adapters = table(values, scales)
    both = AdapterTable(adapters)
    both.write()
    for down, up in values:
        down.mul_(0.01)
        up.mul_(0.01)
    both.write()
    again, adapters = table(values, scales)
    AdapterTable(adapters).write()
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, again, strict=True))


def test_an_adapter_that_is_no_number_has_no_unit() -> None:
    values, scales = parameters(), torch.rand(HEIGHT) + 0.5
    values[0][0][2, 7] = values[1][1][9, 1] = torch.nan
    ours, adapters = table(values, scales)
    AdapterTable(adapters).write()
    assert ours.unit_down.isnan().nonzero().tolist() == [[2]]
    assert ours.unit_up.isnan().nonzero().tolist() == [[8 + 1]]


def rows_of(width: int, *, quantised: bool) -> tuple[Tensor, Tensor | None]:
    if not quantised:
        return torch.randn(ROWS, width + ROOM), None
    payload = torch.zeros(ROWS, width + ROOM).to(E4M3)
    payload[:, :width], scales = reference_quantise_rows(torch.randn(ROWS, width) * torch.rand(ROWS, 1))
    return payload, scales


def factor_of(rank: int, width: int, *, quantised: bool) -> Tensor:
    return (50 * torch.randn(rank, width)).to(E4M3) if quantised else torch.randn(rank, width)


def check_project(*, quantised: bool, back: bool, splits: int) -> Tensor:
    """Forward: all columns from the whole row. Back: each layer's columns from its part of the row."""
    width, spans, rank = (HEIGHT, PIECES, RANK) if back else (WIDTH, WHOLE, ALL_RANKS)
    payload, _ = rows_of(width, quantised=quantised)
    factor = factor_of(rank, width, quantised=quantised)
    segments = segments_of(spans, CPU)
    ours, theirs = torch.full((splits, ROWS, ALL_RANKS), torch.nan), torch.empty(1, ROWS, ALL_RANKS)
    project(payload, factor, segments, rank, ours)
    reference_project(payload, factor, segments, theirs)
    assert_close(ours.sum(0), theirs[0])
    return ours


@pytest.mark.parametrize(("quantised", "back", "splits"), itertools.product((True, False), (True, False), (1, 3)))
def test_project(quantised: bool, back: bool, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "PROJECT_ROWS", 16)
    monkeypatch.setattr(triton_kernel, "_PROJECT_BYTES", 64)
    monkeypatch.setattr(triton_kernel, "_PROJECT_RANKS", 16)
    check_project(quantised=quantised, back=back, splits=splits)


def check_place(*, quantised: bool, unit: float = 1.0, error: float = 1.0, back: bool = False) -> Tensor:
    """How often each row's scale was doubled: unit is what the columns' magnitude is multiplied by."""
    payload, scales = rows_of(WIDTH, quantised=quantised)
    raw = torch.randn(3, ROWS, ALL_RANKS) * 10 ** torch.linspace(-1, 1, ROWS)[:, None]
    own, other = torch.rand(2, ROOM) + 0.5
    other = other * unit
    before = payload.clone(), None if scales is None else scales.clone()
    wanted = torch.empty(ROWS, ALL_RANKS)
    reference_place(raw, own, other, before[0], WIDTH, before[1], wanted)
    if back:
        kept, input_scales = torch.randn(ROWS, ALL_RANKS), torch.rand(ROWS) if quantised else None
        down, up = place_columns_back(raw * error, (own, other), payload, WIDTH, scales, 0.5, kept, input_scales)
        assert (down.lifted, up.lifted) == (quantised, quantised)
        assert_left(down, wanted * 0.5, input_scales)
        assert_left(up, kept, scales)
    else:
        middle = place_columns(raw * error, (own, other), payload, WIDTH, scales, torch.float32)
        assert_close(middle, wanted)
    if scales is None or before[1] is None:
        assert_close(payload, before[0])
        return torch.zeros(ROWS)
    assert torch.equal(scales, before[1]), "a scale moves by powers of two, so nothing may differ"
    assert_same_codes(payload, before[0])
    assert (payload[:, WIDTH + ALL_RANKS :].float() == 0).all()
    columns = payload[:, WIDTH : WIDTH + ALL_RANKS].float() * scales[:, None]
    assert_near(columns, wanted * other[:ALL_RANKS], scales)
    return scales


def assert_left(found: Left, middle: Tensor, row_scales: Tensor | None) -> None:
    assert found.rows.shape[1] % 64 == 0
    wanted = middle.T if row_scales is None else middle.T * row_scales * LIFT
    assert_close(found.rows[:, :ROWS] / LIFT, wanted / LIFT)


def left_of(middle: Tensor, row_scales: Tensor | None) -> Left:
    rows = torch.full((middle.shape[1], -(-middle.shape[0] // 64) * 64), torch.nan)
    reference_left(middle, row_scales, rows)
    return Left(rows, lifted=row_scales is not None)


def assert_near(found: Tensor, wanted: Tensor, scales: Tensor) -> None:
    """Nothing was clamped: every value is within half a step of e4m3 of what it stands for."""
    assert ((found - wanted).abs() <= wanted.abs() / 16 * 1.001 + scales[:, None] * 2**-10).all()


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("rows", [32, 16])
def test_place(quantised: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PLACE_ROWS", rows)
    check_place(quantised=quantised)
    check_place(quantised=quantised, back=True)


def test_a_left_side_is_not_lifted_while_the_rows_it_will_meet_are_not_known() -> None:
    payload, scales = rows_of(WIDTH, quantised=True)
    raw, units = torch.randn(1, ROWS, ALL_RANKS), (torch.ones(ROOM), torch.ones(ROOM))
    assert scales is not None
    wanted = raw[0].T * scales
    down, up = place_columns_back(raw, units, payload, WIDTH, scales, 1.0, torch.ones(ROWS, ALL_RANKS), None)
    assert (down.lifted, up.lifted) == (False, True)
    assert_close(down.rows[:, :ROWS], wanted)


def test_columns_beyond_e4m3_move_their_row_to_a_larger_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PLACE_CHUNK", 64)
    payload, scales = rows_of(WIDTH, quantised=True)
    assert scales is not None
    before = payload[:, :WIDTH].float() * scales[:, None]
    old = scales.clone()
    raw = torch.ones(1, ROWS, ALL_RANKS)
    raw[0, :, 4] = 10 ** torch.linspace(0, 5, ROWS)
    place_columns(raw, (torch.ones(ROOM), torch.ones(ROOM)), payload, WIDTH, scales, torch.float32)
    moved = scales / old
    wanted = torch.exp2((raw[0, :, 4] / LARGEST).log2().ceil()).clamp(min=1)
    assert torch.equal(moved, wanted)
    assert (moved == 1).any()
    assert (moved >= 256).any()
    after = payload[:, :WIDTH].float() * scales[:, None]
    assert torch.equal(after[moved == 1], before[moved == 1])
    assert_near(after, before, scales)
    assert_near(payload[:, WIDTH : WIDTH + ALL_RANKS].float() * scales[:, None], raw[0] * old[:, None], scales)


@pytest.mark.parametrize("unit", [30.0, 3000.0])
def test_place_agrees_where_scales_move(unit: float) -> None:
    check_place(quantised=True, unit=unit)
    check_place(quantised=True, unit=unit, back=True)


def check_columns(*, quantised: bool, back: bool, unit: float = 1.0, error: float = 1.0) -> None:
    """In one go, against the definitions one after the other. Back: each layer's columns from its part of the row."""
    width, spans, rank = (HEIGHT, PIECES, RANK) if back else (WIDTH, WHOLE, ALL_RANKS)
    payload, scales = rows_of(width, quantised=quantised)
    factor, segments = factor_of(rank, width, quantised=quantised), segments_of(spans, CPU)
    own, other = torch.rand(2, ROOM) * 1e-3
    wanted, wanted_scales = payload.clone(), None if scales is None else scales.clone()
    raw, middle = torch.empty(1, ROWS, ALL_RANKS), torch.empty(ROWS, ALL_RANKS)
    reference_project(payload, factor, segments, raw)
    reference_place(raw, own, other * unit, wanted, width, wanted_scales, middle)
    factor = factor if quantised else factor * error
    projection = Projection(factor, segments, ALL_RANKS, (own * error, other * unit))
    if back:
        kept, input_scales = torch.randn(ROWS, ALL_RANKS), torch.rand(ROWS) if quantised else None
        down, up = add_columns_back(payload, width, scales, projection, 0.5, kept, input_scales)
        assert (down.lifted, up.lifted) == (quantised, quantised)
        assert_left(down, middle * 0.5, input_scales)
        assert_left(up, kept, wanted_scales)
    else:
        assert_close(add_columns(payload, width, scales, projection, torch.float32), middle)
    if scales is None or wanted_scales is None:
        assert_close(payload, wanted)
        return
    assert torch.equal(scales, wanted_scales)
    assert_same_codes(payload, wanted)


@pytest.mark.parametrize(("quantised", "back"), itertools.product((True, False), (True, False)))
def test_columns_in_one_go(quantised: bool, back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "PROJECT_ROWS", 16)
    monkeypatch.setattr(triton_kernel, "_PROJECT_BYTES", 64)
    monkeypatch.setattr(triton_kernel, "place", None)  # which the other way would call
    check_columns(quantised=quantised, back=back)
    if quantised:
        check_columns(quantised=True, back=back, unit=1e6)
    with pytest.raises(AssertionError):
        check_columns(quantised=quantised, back=back, error=1.001)


@pytest.mark.parametrize("back", [True, False])
def test_more_ranks_than_a_program_can_write_take_two_steps(back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_PROJECT_RANKS", 8)
    monkeypatch.setattr(triton_kernel, "project_and_place", None)
    check_columns(quantised=True, back=back)


def check_gradients(*, quantised: bool, rows: int = ROWS, error: float = 1.0, lifted: bool = True) -> None:
    """Of A: all ranks over the input's width. Of B: each layer's ranks over its part, transposed, with divisors."""
    found, wanted = [], []
    for up in (False, True):
        width, spans, rank = (HEIGHT, PIECES, RANK) if up else (WIDTH, WHOLE, ALL_RANKS)
        middle = torch.randn(rows, ALL_RANKS)
        payload = (20 * torch.randn(rows, width + ROOM)).to(E4M3 if quantised else torch.float32)
        scales = torch.rand(rows) if quantised else None
        divisors = torch.rand(width) + 0.5 if up else None
        ours, theirs = torch.full((2, width, rank) if up else (2, rank, width), 7.0)
        given = left_of(middle * (error if up else 1.0), scales if lifted or up else None)
        others = scales, payload, blocks_of(spans, CPU), rank, divisors
        found.append(Side(given, *others, ours.T if up else ours))
        wanted.append(Side(left_of(middle, None), *others, theirs.T if up else theirs))
    adapter_gradients(*found)
    for side in wanted:
        reference_gradient(side)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_close(ours.out, theirs.out, tolerance=max(1.0, (rows / 100) ** 0.5) * ULPS)


@pytest.mark.parametrize("quantised", [True, False])
def test_gradients(quantised: bool) -> None:
    check_gradients(quantised=quantised)


def test_gradients_of_which_one_lifts_its_left_side_itself() -> None:
    check_gradients(quantised=True, lifted=False)


@pytest.mark.parametrize("quantised", [True, False])
def test_gradients_of_rows_in_several_parts(quantised: bool) -> None:
    check_gradients(quantised=quantised, rows=700)


@pytest.mark.parametrize("quantised", [True, False])
def test_gradients_of_blocks_in_several_pieces(quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gradient, "_SUMS", 16 * 64)  # as with a rank of 256
    check_gradients(quantised=quantised)


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("at_once", [4, 8, 12])
def test_gradients_of_more_ranks_than_are_formed_at_once(
    quantised: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_gradient, "_RANKS", at_once)
    check_gradients(quantised=quantised)


def gradient_of_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """One rank, whose values are 1 in the first row and 0 in the second, over rows of these e4m3 codes."""
    payload = codes.to(torch.uint8).view(E4M3).expand(2, -1).contiguous()
    left, blocks = left_of(torch.tensor([[1.0], [0.0]]), scales), blocks_of([(0, codes.numel(), 0, 1)], CPU)
    sides = [Side(left, scales, payload, blocks, 1, None, torch.empty(1, codes.numel())) for _ in range(2)]
    adapter_gradients(*sides)
    torch.testing.assert_close(sides[0].out, sides[1].out, rtol=0, atol=0, equal_nan=True)
    return sides[0].out[0]


def test_the_gradient_reads_every_code_exactly() -> None:
    codes = torch.arange(256)[torch.arange(256) % 128 != 127]
    codes = torch.cat([codes, codes[:2]])  # a multiple of 16
    for scale in (1.0, 2.0**-60, 2.0**20):
        assert torch.equal(
            gradient_of_codes(codes, torch.full((2,), scale)), codes.to(torch.uint8).view(E4M3).float() * scale
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity times nought
@pytest.mark.parametrize("scale", [torch.nan, torch.inf])
@pytest.mark.parametrize("code", [0x7F, 0x00, 0x7E])
def test_a_row_without_a_scale_shows_in_the_gradient(scale: float, code: int) -> None:
    """A row with a NaN has that for a scale (see `quantise_rows`), and with an infinity it has infinity."""
    found = gradient_of_codes(torch.full((32,), code), torch.tensor([scale, 1.0]))
    assert not found.isfinite().any()


def test_gradient_leaves_what_no_adapter_owns_alone() -> None:
    left, payload, blocks = (
        left_of(torch.randn(ROWS, ALL_RANKS), None),
        torch.randn(ROWS, HEIGHT),
        blocks_of(PIECES, CPU),
    )
    sides = [Side(left, None, payload, blocks, RANK, None, torch.full((RANK, HEIGHT), 7.0)) for _ in range(2)]
    adapter_gradients(*sides)
    for side in sides:
        assert (side.out[:, STARTS[1] : STARTS[2]] == 7).all()
        assert (side.out[RANKS[2] :, STARTS[2] :] == 7).all()
        assert (side.out[: RANKS[0], : HEIGHTS[0]] != 7).all()


def test_a_small_error_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for quantised in (True, False):
        with pytest.raises(AssertionError):
            check_write(quantised=quantised, error=1e-3)
        with pytest.raises(AssertionError):
            check_place(quantised=quantised, error=1.0001)
        with pytest.raises(AssertionError):
            check_gradients(quantised=quantised, error=1.0001)
    with pytest.raises(AssertionError):
        monkeypatch.setattr(triton_kernel, "LARGEST", tl.constexpr(447.0))
        check_write(quantised=True)


def test_a_projection_that_stops_early_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [(0, WIDTH - 16, 0, ALL_RANKS)]
    monkeypatch.setattr(triton_kernel, "_PROJECT_BYTES", 64)
    payload, _ = rows_of(WIDTH, quantised=False)
    factor = factor_of(ALL_RANKS, WIDTH, quantised=False)
    ours, theirs = torch.empty(1, ROWS, ALL_RANKS), torch.empty(1, ROWS, ALL_RANKS)
    project(payload, factor, segments_of(spans, CPU), ALL_RANKS, ours)
    reference_project(payload, factor, segments_of(WHOLE, CPU), theirs)
    with pytest.raises(AssertionError):
        assert_close(ours[0], theirs[0])
