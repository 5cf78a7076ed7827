"""The fused layers' kernels where Triton compiles them: what the interpreter cannot show are instructions of the GPU's
own, rows on their way to shared memory, and what becomes of NaN."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3, LIMIT
from pantheraml.kernels.fp8_product import transposed
from pantheraml.kernels.gated_activation import (
    Rows,
    gated_activation,
    gated_activation_backward,
    reference_gated,
    reference_gated_backward,
)
from pantheraml.kernels.lora_columns import Left, Side, adapter_gradients, blocks_of
from pantheraml.kernels.lora_columns.reference import reference_left
from pantheraml.kernels.quantise_rows import copy_rows, quantise_rows, reference_quantise_rows
from pantheraml.kernels.rms_norm import (
    Quantised,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantised,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.kernels.rotary import reference_rotate, rotate, unrotate, unrotate_quantised
from pantheraml.kernels.trained_weight import (
    reference_weight_scale,
    reference_weight_to_e4m3,
    weight_scales,
    weight_to_e4m3,
)
from pantheraml.kernels.turned_rows import reference_turned_rows, turned_rows
from tests.interpreter.comparison import assert_same_codes

GPU = torch.device("cuda")
BOTH = (False, True)
WIDTHS = [14336, 16384, 11008, 8192, 3072, 80, 18944]
"""Of MLPs: rows that fill a processor, that several have room on, and that the registers do not hold."""


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 products need compute capability 9.0")
    torch.manual_seed(0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=GPU)).bfloat16()


def assert_same_rows(payload: Tensor, scales: Tensor, wanted: Tensor, wanted_scales: Tensor) -> None:
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-5, atol=0)  # an exponential is right to 2**-22 or so
    assert_same_codes(payload, wanted)


def assert_rows(found: Rows, wanted: Tensor, multiplier: Tensor | None = None, *, atol: float = 1e-6) -> None:
    columns = wanted.shape[1]
    if found.scales is None:
        torch.testing.assert_close(found.payload[:, :columns], wanted.bfloat16(), rtol=2**-7, atol=atol)
    else:
        assert_same_rows(found.payload[:, :columns], found.scales, *reference_quantise_rows(wanted, multiplier))


def left_of(middle: Tensor, row_scales: Tensor | None) -> Left:
    """As `place_columns_back` makes it."""
    rows = torch.full((middle.shape[1], -(-middle.shape[0] // 64) * 64), torch.nan, device=GPU, dtype=middle.dtype)
    reference_left(middle, row_scales, rows)
    return Left(rows, lifted=row_scales is not None)


def powers(rows: int) -> Tensor:
    """Row scales by which bf16 is multiplied exactly."""
    return torch.exp2(torch.randint(-12, -3, (rows,), device=GPU).float())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("gelu", "quantise"), itertools.product(BOTH, BOTH))
def test_gated_activation(width: int, gelu: bool, quantise: bool) -> None:
    pair, g = normal(300, 2 * width, scale=3.0), normal(300, width)
    assert_rows(gated_activation(pair, room=64, gelu=gelu, quantise=quantise), reference_gated(pair, gelu=gelu))
    hidden, gradient = gated_activation_backward(g, pair, rooms=(0, 64), gelu=gelu, quantise=quantise)
    assert_rows(hidden, reference_gated(pair, gelu=gelu))
    # the slope of GELU far below zero is a difference of two numbers near one, of which float32 leaves 1e-7
    assert_rows(gradient, reference_gated_backward(g, pair, gelu=gelu), atol=3e-5 if gelu else 1e-6)


def test_gated_activation_with_multipliers() -> None:
    pair, g, multiplier = normal(300, 2 * 14336), normal(300, 14336), torch.rand(2 * 14336, device=GPU) + 0.5
    hidden, gradient = gated_activation_backward(g, pair, multiplier=multiplier)
    assert_rows(hidden, reference_gated(pair))
    assert_rows(gradient, reference_gated_backward(g, pair), multiplier)


NORM_WIDTHS = [4096, 8192, 3072, 80]


def norm_inputs(width: int, *, quantised: bool) -> dict[str, Any]:
    """Inputs of a norm's backward pass: weights next to nought too, and behind a result what nobody may read."""
    x, weight = normal(301, width), (0.3 + 1.2 * torch.rand(width, device=GPU)).bfloat16()
    weight[::9], weight[5], weight[6] = 1e-4, 0.0, 1e-39
    found = rms_norm(x, weight, 1e-5, room=64)
    assert found.scales is not None
    found.payload.view(torch.uint8)[:, width:] = 0x7F
    return {
        "x": Quantised(found.payload, found.scales) if quantised else x,
        "weight": weight,
        "inverse": found.inverse,
    }


def reference_dx(g: Tensor, x: Tensor | Quantised, weight: Tensor, inverse: Tensor, residual: Tensor | None) -> Tensor:
    """In float32."""
    wide = None if residual is None else residual.float()
    if isinstance(x, Tensor):
        return reference_rms_norm_backward(g.float(), x, weight, inverse, residual=wide)
    return reference_rms_norm_backward_quantised(g.float(), *x, weight, inverse, residual=wide)


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize(("quantised", "residual"), itertools.product(BOTH, BOTH))
def test_the_gradient_of_a_norm(width: int, quantised: bool, residual: bool) -> None:
    """Within a rounding to bf16, and a few last places of float32 where terms cancel."""
    g, other = normal(301, width), normal(301, width) if residual else None
    given = norm_inputs(width, quantised=quantised)
    found = rms_norm_backward(g, **given, residual=other)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), reference_dx(g, **given, residual=other), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_the_gradient_of_a_norm_from_its_result_is_near_that_from_its_input(width: int) -> None:
    x, g = normal(301, width), normal(301, width)
    weight = (0.3 + 1.2 * torch.rand(width, device=GPU)).bfloat16()
    found = rms_norm(x, weight, 1e-5, room=64)
    assert found.scales is not None
    ours = rms_norm_backward(g, Quantised(found.payload, found.scales), weight, found.inverse).float()
    theirs = rms_norm_backward(g, x, weight, found.inverse).float()
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize(("quantised", "scaled"), itertools.product(BOTH, BOTH))
def test_the_gradient_of_a_norm_is_quantised_as_by_a_pass_of_its_own(width: int, quantised: bool, scaled: bool) -> None:
    """Two kernels may contract multiplications and sums differently, so their dx may be a rounding apart."""
    g, residual = normal(301, width), normal(301, width)
    given = norm_inputs(width, quantised=quantised)
    multiplier = torch.rand(width, device=GPU) + 0.5 if scaled else None
    found = rms_norm_backward_rows(g, **given, residual=residual, room=64, multiplier=multiplier, dtype=E4M3)
    plain = rms_norm_backward_rows(g, **given, residual=residual, room=64, dtype=torch.bfloat16)
    dx = rms_norm_backward(g, **given, residual=residual)
    for other in (found.dx, plain.dx):
        torch.testing.assert_close(other.float(), dx.float(), rtol=2**-7, atol=1e-5)
        assert (other == dx).float().mean() > 0.99
    assert torch.equal(plain.payload[:, :width], plain.dx)
    payload, scales = quantise_rows(found.dx, multiplier=multiplier)
    assert found.scales is not None
    torch.testing.assert_close(found.scales, scales, rtol=1e-6, atol=0)
    assert_same_codes(found.payload[:, :width], payload)


HEADS = [((32, 8, 8), 128), ((28, 4, 4), 128), ((32, 32, 32), 96), ((9, 3, 3), 64)]
"""Of queries, keys and values, and their size."""


def turns(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angle = 6 * torch.rand(tokens, size // 2, device=GPU)
    return torch.cat([angle.cos()] * 2, 1).bfloat16(), torch.cat([angle.sin()] * 2, 1).bfloat16()


@pytest.mark.parametrize(("heads", "size"), HEADS)
@pytest.mark.parametrize("strided", BOTH)
def test_rotation_there_and_back(heads: tuple[int, int, int], size: int, strided: bool) -> None:
    """To the last bit: float32 holds products of two bf16 numbers exactly, so nothing hangs on their order."""
    tokens, columns = 300, sum(heads) * size
    cos, sin = turns(tokens, size)
    merged = normal(tokens, columns)
    q, k, v = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    wanted = reference_rotate(q, cos, sin), reference_rotate(k, cos, sin), v
    for in_place in BOTH:
        found = rotate(merged.clone(), cos, sin, heads=heads, in_place=in_place)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    if strided:
        q, k, v = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v))
    back = reference_rotate(q, cos, -sin), reference_rotate(k, cos, -sin), v
    ours = unrotate((q, k, v), cos, sin, room=64)
    assert ours.shape == (tokens, columns + 64)
    assert torch.equal(ours[:, :columns], torch.cat([part.flatten(1) for part in back], 1))


@pytest.mark.parametrize("width", [*WIDTHS, 4096, 5120])
def test_copies(width: int) -> None:
    x = normal(300, width + 8)
    for rows in (x[:, :width].contiguous(), x[:, :width], x[:, 3 : width + 3]):
        assert torch.equal(copy_rows(rows, room=64, dtype=torch.bfloat16)[:, :width], rows)
    assert torch.equal(copy_rows(x.float(), room=0, dtype=torch.bfloat16), x)


@pytest.mark.parametrize(("heads", "size"), HEADS)
@pytest.mark.parametrize("scaled", BOTH)
def test_unrotate_and_quantise(heads: tuple[int, int, int], size: int, scaled: bool) -> None:
    tokens = 300
    q, k, v = (normal(count, tokens, size, scale=1e-3).transpose(0, 1) for count in heads)
    cos, sin = turns(tokens, size)
    columns = sum(heads) * size
    multiplier = torch.rand(columns, device=GPU) + 0.5 if scaled else None
    payload, scales = unrotate_quantised((q, k, v), cos, sin, room=64, multiplier=multiplier)
    turned = [reference_rotate(part.float(), cos, -sin).flatten(1) for part in (q, k)]
    wanted = reference_quantise_rows(torch.cat([*turned, v.float().flatten(1)], 1), multiplier)
    assert_same_rows(payload[:, :columns], scales, *wanted)


@pytest.mark.parametrize("shape", [(4160, 4096), (200, 300), (16, 48), (3, 130)])
def test_transposition(shape: tuple[int, int]) -> None:
    source = torch.randint(0, 256, (shape[0], shape[1] + 64), dtype=torch.uint8, device=GPU)[:, : shape[1]].view(E4M3)
    assert torch.equal(transposed(source).view(torch.uint8), source.view(torch.uint8).T)


def test_scales_are_the_references_to_the_last_bit() -> None:
    """Largest magnitudes of LIMIT times powers of two, and next to that."""
    powers = LIMIT * torch.exp2(torch.arange(-120, 121, device=GPU).float())
    above, below = (powers.nextafter(torch.tensor(end, device=GPU)) for end in (torch.inf, 0.0))
    rows = torch.cat([powers, above, below])[:, None] * torch.tensor([1.0, -0.3, 0.001], device=GPU)
    payload, scales = quantise_rows(rows)
    wanted, wanted_scales = reference_quantise_rows(rows)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(payload.float(), wanted.float())


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("rows", [8192, 301, 1])
def test_the_gradient_of_a_norms_weight(rows: int, width: int) -> None:
    x, g, inverse = normal(rows, width), normal(rows, width), torch.rand(rows, device=GPU) + 0.5
    terms = g.double() * x.double() * inverse.double()[:, None]
    found = rms_norm_weight_gradient(g, x, inverse, torch.float32)
    assert ((found - terms.sum(0)).abs() <= 1e-6 * terms.abs().sum(0)).all()
    assert torch.equal(found, rms_norm_weight_gradient(g, x, inverse, torch.float32))
    rounded = rms_norm_weight_gradient(g, x, inverse, torch.bfloat16)
    assert torch.equal(rounded, found.bfloat16())
    wide = rms_norm_weight_gradient(g.float(), x.float(), inverse, torch.float32)
    torch.testing.assert_close(wide, found, rtol=1e-5, atol=1e-3)


WEIGHTS = [(4096, 4096), (14336, 4096), (1024, 4096), (272, 80), (16, 16)]


@pytest.mark.parametrize("shape", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trained_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """To the last bit, in both directions, with nothing written beside them."""
    rows, columns = shape
    weights = [
        normal(rows, columns + 16, scale=0.02).to(dtype)[:, :columns],
        normal(rows, columns, scale=0.02).to(dtype),
    ]
    for weight, row in ((weights[0], 0), (weights[1], rows - 1)):
        weight[row, columns - 1] = -1.0
        scales = weight_scales(weights, 3000)
        assert torch.equal(scales, reference_weight_scale(weights).repeat(3000))
        weight[row, columns - 1] = 0.0
    for weight, turned in itertools.product(weights, BOTH):
        matrix = torch.full((columns, rows + 64) if turned else (rows, columns + 64), 0x55, device=GPU).byte()
        inner = matrix[:, 16:-48]
        place = (inner.T if turned else inner).view(E4M3)
        weight_to_e4m3(weight, scales, place)
        wanted = torch.empty(shape, dtype=E4M3, device=GPU)
        reference_weight_to_e4m3(weight, scales[0], wanted)
        assert torch.equal(place.view(torch.uint8), wanted.view(torch.uint8))
        inner.fill_(0x55)
        assert (matrix == 0x55).all()
    weights[0][rows // 2, 7] = torch.nan
    assert weight_scales(weights, 2).isnan().all()


@pytest.mark.parametrize("columns", [4096, 14336, 2048, 80, 16])
@pytest.mark.parametrize("rows", [8192, 1000, 37, 1])
def test_turned_rows(rows: int, columns: int) -> None:
    """To the last bit, but for the sign of a nought."""
    codes = torch.randint(0, 256, (rows, columns + 64), dtype=torch.uint8, device=GPU)
    payload = codes.view(E4M3)[:, :columns]
    turned = turned_rows(payload, None)[0].view(torch.uint8)
    assert torch.equal(turned[:, :rows], codes[:, :columns].T)
    assert turned.shape == (columns, -(-rows // 16) * 16)
    assert not turned[:, rows:].any()
    codes[codes & 0x7F == 0x7F] = 0
    codes[:, 5] = 0
    codes[rows // 2, 9] = 0x7F
    factors = torch.exp2(torch.randint(-60, 10, (rows,), device=GPU).float())
    found, scales = turned_rows(payload, factors)
    wanted = torch.empty_like(found)
    wanted_scales = reference_turned_rows(payload, factors, wanted)
    assert scales is not None
    assert wanted_scales is not None
    assert scales.isnan().nonzero().tolist() == [[9]]
    assert not found.view(torch.uint8)[:, rows:].any()
    others = torch.arange(columns, device=GPU) != 9
    assert torch.equal(scales[others], wanted_scales[others])
    assert torch.equal(found[others].float(), wanted[others].float())


def test_kernels_of_trained_weights_are_recorded() -> None:
    """In a CUDA graph: nothing waits for the GPU, and what a replay starts from is set back."""
    weight, rows, factors = normal(256, 512), quantise_rows(normal(300, 512))[0], powers(300)
    matrix = torch.empty(512, 256, dtype=E4M3, device=GPU)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        scales = weight_scales([weight], 16)
        weight_to_e4m3(weight, scales, matrix.T)
        turned, columns = turned_rows(rows, factors)
        assert columns is not None
        return scales, turned, columns

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = work()
    weight.mul_(2.0**-7)
    factors.mul_(2.0**-3)
    graph.replay()
    written = matrix.float()
    for ours, theirs in zip(recorded, work(), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    assert torch.equal(written, matrix.float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_none_afterwards(value: float) -> None:
    """In every e4m3 row that a kernel writes, and in the adapters' gradient after it."""
    x, rows = normal(64, 4096), torch.arange(64, device=GPU)
    x[7, 3000] = value
    pair, g = normal(64, 2 * 14336), normal(64, 14336)
    g[7, 14000] = value
    heads = tuple(normal(64, count, 128) for count in (32, 8, 8))
    heads[1][7, 3, 100] = value
    still = torch.ones(64, 128, device=GPU).bfloat16(), torch.zeros(64, 128, device=GPU).bfloat16()
    normed = rms_norm(x, torch.ones(4096, device=GPU).bfloat16(), 1e-5)
    assert normed.scales is not None
    gradient = gated_activation_backward(g, pair)[1]
    assert gradient.scales is not None
    for payload, scales in (
        quantise_rows(x),
        unrotate_quantised((heads[0], heads[1], heads[2]), *still),
        (normed.payload, normed.scales),
        (gradient.payload, gradient.scales),
    ):
        real = payload.float() * scales[:, None]
        assert real[7].isnan().all()
        assert real[rows != 7].isfinite().all()
        out = torch.zeros(16, payload.shape[1], device=GPU)
        blocks = blocks_of([(0, payload.shape[1], 0, 16)], GPU)
        side = Side(left_of(normal(64, 16), scales), scales, payload, blocks, 16, None, out)
        adapter_gradients(side, side._replace(out=torch.zeros_like(out)))
        assert not out.isfinite().any()
