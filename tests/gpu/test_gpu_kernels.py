"""The fused layers' kernels as compiled by Triton.

The interpreter cannot cover GPU-specific instructions, shared memory and NaN handling.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, LIMIT
from pantheraml.kernels.fp8.matmul import transposed
from pantheraml.kernels.fp8.quantize_rows import copy_rows, quantize_rows, reference_quantize_rows
from pantheraml.kernels.fp8.transpose import fp8_transpose, reference_fp8_transpose
from pantheraml.kernels.fp8.weight_cast import (
    reference_weight_scale,
    reference_weight_to_e4m3,
    weight_scales,
    weight_to_e4m3,
)
from pantheraml.kernels.gated_activation import (
    GatedRows,
    gated_activation,
    gated_activation_backward,
    reference_gated,
    reference_gated_backward,
)
from pantheraml.kernels.lora_columns import GradMatmul, LeftOperand, adapter_gradients, block_table
from pantheraml.kernels.lora_columns.reference import reference_left_operand
from pantheraml.kernels.rms_norm import (
    QuantizedRows,
    reference_rms_norm_backward,
    reference_rms_norm_backward_quantized,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.kernels.rotary import reference_rope, rope_backward, rope_backward_quantized, rope_forward
from tests.interpreter.comparison import assert_same_codes

GPU = torch.device("cuda")
BOTH = (False, True)
WIDTHS = [14336, 16384, 11008, 8192, 3072, 80, 18944]
"""MLP widths: rows that fill an SM, several that fit on one, and rows too large for the registers."""


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("row-wise fp8 matmuls need compute capability 9.0")
    torch.manual_seed(0)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=GPU)).bfloat16()


def assert_same_rows(qdata: Tensor, scales: Tensor, expected: Tensor, expected_scales: Tensor) -> None:
    torch.testing.assert_close(scales, expected_scales, rtol=1e-5, atol=0)  # exp is accurate to about 2**-22
    assert_same_codes(qdata, expected)


def assert_rows(actual: GatedRows, expected: Tensor, multiplier: Tensor | None = None, *, atol: float = 1e-6) -> None:
    columns = expected.shape[1]
    if actual.scales is None:
        torch.testing.assert_close(actual.qdata[:, :columns], expected.bfloat16(), rtol=2**-7, atol=atol)
    else:
        assert_same_rows(actual.qdata[:, :columns], actual.scales, *reference_quantize_rows(expected, multiplier))


def left_operand(lora_mid: Tensor, row_scales: Tensor | None) -> LeftOperand:
    """As built by `place_columns_backward`."""
    rows = torch.full(
        (lora_mid.shape[1], -(-lora_mid.shape[0] // 64) * 64), torch.nan, device=GPU, dtype=lora_mid.dtype
    )
    reference_left_operand(lora_mid, row_scales, rows)
    return LeftOperand(rows, prescaled=row_scales is not None)


def powers(rows: int) -> Tensor:
    """Row scales that multiply bf16 exactly."""
    return torch.exp2(torch.randint(-12, -3, (rows,), device=GPU).float())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("gelu", "quantize"), itertools.product(BOTH, BOTH))
def test_gated_activation(width: int, gelu: bool, quantize: bool) -> None:
    gate_up, g = normal(300, 2 * width, scale=3.0), normal(300, width)
    assert_rows(
        gated_activation(gate_up, pad_cols=64, gelu=gelu, quantize=quantize), reference_gated(gate_up, gelu=gelu)
    )
    hidden, gradient = gated_activation_backward(g, gate_up, pad_cols=(0, 64), gelu=gelu, quantize=quantize)
    assert_rows(hidden, reference_gated(gate_up, gelu=gelu))
    # the slope of GELU far below zero is a difference of two numbers close to 1, accurate to 1e-7 in float32
    assert_rows(gradient, reference_gated_backward(g, gate_up, gelu=gelu), atol=3e-5 if gelu else 1e-6)


def test_gated_activation_with_multipliers() -> None:
    gate_up, g, multiplier = normal(300, 2 * 14336), normal(300, 14336), torch.rand(2 * 14336, device=GPU) + 0.5
    hidden, gradient = gated_activation_backward(g, gate_up, multiplier=multiplier)
    assert_rows(hidden, reference_gated(gate_up))
    assert_rows(gradient, reference_gated_backward(g, gate_up), multiplier)


NORM_WIDTHS = [4096, 8192, 3072, 80]


def norm_inputs(width: int, *, quantized: bool) -> dict[str, Any]:
    """Inputs of a norm's backward: some weights close to zero, and NaN in the padding, which must not be read."""
    x, weight = normal(301, width), (0.3 + 1.2 * torch.rand(width, device=GPU)).bfloat16()
    weight[::9], weight[5], weight[6] = 1e-4, 0.0, 1e-39
    actual = rms_norm(x, weight, 1e-5, pad_cols=64)
    assert actual.scales is not None
    actual.qdata.view(torch.uint8)[:, width:] = 0x7F
    return {
        "x": QuantizedRows(actual.qdata, actual.scales) if quantized else x,
        "weight": weight,
        "inverse": actual.inverse,
    }


def reference_dx(
    g: Tensor, x: Tensor | QuantizedRows, weight: Tensor, inverse: Tensor, residual: Tensor | None
) -> Tensor:
    """Reference in float32."""
    wide = None if residual is None else residual.float()
    if isinstance(x, Tensor):
        return reference_rms_norm_backward(g.float(), x, weight, inverse, residual=wide)
    return reference_rms_norm_backward_quantized(g.float(), *x, weight, inverse, residual=wide)


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize(("quantized", "residual"), itertools.product(BOTH, BOTH))
def test_norm_gradient(width: int, quantized: bool, residual: bool) -> None:
    """Within one bf16 rounding, and a few ulps of float32 where terms cancel."""
    g, other = normal(301, width), normal(301, width) if residual else None
    arguments = norm_inputs(width, quantized=quantized)
    actual = rms_norm_backward(g, **arguments, residual=other)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), reference_dx(g, **arguments, residual=other), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("width", NORM_WIDTHS)
def test_norm_gradient_from_quantized_output_is_close(width: int) -> None:
    x, g = normal(301, width), normal(301, width)
    weight = (0.3 + 1.2 * torch.rand(width, device=GPU)).bfloat16()
    actual = rms_norm(x, weight, 1e-5, pad_cols=64)
    assert actual.scales is not None
    ours = rms_norm_backward(g, QuantizedRows(actual.qdata, actual.scales), weight, actual.inverse).float()
    theirs = rms_norm_backward(g, x, weight, actual.inverse).float()
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize(("quantized", "scaled"), itertools.product(BOTH, BOTH))
def test_norm_gradient_quantization_matches_a_separate_pass(width: int, quantized: bool, scaled: bool) -> None:
    """Two kernels may contract multiply-adds differently, so their dx may differ by one rounding."""
    g, residual = normal(301, width), normal(301, width)
    arguments = norm_inputs(width, quantized=quantized)
    multiplier = torch.rand(width, device=GPU) + 0.5 if scaled else None
    actual = rms_norm_backward_rows(g, **arguments, residual=residual, pad_cols=64, multiplier=multiplier, dtype=E4M3)
    plain = rms_norm_backward_rows(g, **arguments, residual=residual, pad_cols=64, dtype=torch.bfloat16)
    dx = rms_norm_backward(g, **arguments, residual=residual)
    for other in (actual.dx, plain.dx):
        torch.testing.assert_close(other.float(), dx.float(), rtol=2**-7, atol=1e-5)
        assert (other == dx).float().mean() > 0.99
    assert torch.equal(plain.qdata[:, :width], plain.dx)
    qdata, scales = quantize_rows(actual.dx, multiplier=multiplier)
    assert actual.scales is not None
    torch.testing.assert_close(actual.scales, scales, rtol=1e-6, atol=0)
    assert_same_codes(actual.qdata[:, :width], qdata)


HEADS = [((32, 8, 8), 128), ((28, 4, 4), 128), ((32, 32, 32), 96), ((9, 3, 3), 64)]
"""Numbers of query, key and value heads, and the head size."""


def rope_table(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angle = 6 * torch.rand(tokens, size // 2, device=GPU)
    return torch.cat([angle.cos()] * 2, 1).bfloat16(), torch.cat([angle.sin()] * 2, 1).bfloat16()


@pytest.mark.seed("S4-161")
@pytest.mark.parametrize(("heads", "size"), HEADS)
@pytest.mark.parametrize("strided", BOTH)
def test_rope_forward_and_backward(heads: tuple[int, int, int], size: int, strided: bool) -> None:
    """Bitwise: float32 holds the product of two bf16 numbers exactly, so the order does not matter."""
    tokens, columns = 300, sum(heads) * size
    cos, sin = rope_table(tokens, size)
    merged = normal(tokens, columns)
    q, k, v = merged.unflatten(1, (-1, size)).split(heads, dim=1)
    expected = reference_rope(q, cos, sin), reference_rope(k, cos, sin), v
    for in_place in BOTH:
        actual = rope_forward(merged.clone(), cos, sin, heads=heads, in_place=in_place)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))
    if strided:
        q, k, v = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in (q, k, v))
    expected_backward = reference_rope(q, cos, -sin), reference_rope(k, cos, -sin), v
    ours = rope_backward((q, k, v), cos, sin, pad_cols=64)
    assert ours.shape == (tokens, columns + 64)
    assert torch.equal(ours[:, :columns], torch.cat([part.flatten(1) for part in expected_backward], 1))


@pytest.mark.parametrize("width", [*WIDTHS, 4096, 5120])
def test_copies(width: int) -> None:
    x = normal(300, width + 8)
    for rows in (x[:, :width].contiguous(), x[:, :width], x[:, 3 : width + 3]):
        assert torch.equal(copy_rows(rows, pad_cols=64, dtype=torch.bfloat16)[:, :width], rows)
    assert torch.equal(copy_rows(x.float(), pad_cols=0, dtype=torch.bfloat16), x)


@pytest.mark.parametrize(("heads", "size"), HEADS)
@pytest.mark.parametrize("scaled", BOTH)
def test_rope_backward_and_quantize(heads: tuple[int, int, int], size: int, scaled: bool) -> None:
    tokens = 300
    q, k, v = (normal(count, tokens, size, scale=1e-3).transpose(0, 1) for count in heads)
    cos, sin = rope_table(tokens, size)
    columns = sum(heads) * size
    multiplier = torch.rand(columns, device=GPU) + 0.5 if scaled else None
    qdata, scales = rope_backward_quantized((q, k, v), cos, sin, pad_cols=64, multiplier=multiplier)
    rotated = [reference_rope(part.float(), cos, -sin).flatten(1) for part in (q, k)]
    expected = reference_quantize_rows(torch.cat([*rotated, v.float().flatten(1)], 1), multiplier)
    assert_same_rows(qdata[:, :columns], scales, *expected)


@pytest.mark.parametrize("shape", [(4160, 4096), (200, 300), (16, 48), (3, 130)])
def test_transposition(shape: tuple[int, int]) -> None:
    source = torch.randint(0, 256, (shape[0], shape[1] + 64), dtype=torch.uint8, device=GPU)[:, : shape[1]].view(E4M3)
    assert torch.equal(transposed(source).view(torch.uint8), source.view(torch.uint8).T)


def test_scales_match_the_reference_bitwise() -> None:
    """Row maxima of LIMIT times powers of two, and their neighbors."""
    powers = LIMIT * torch.exp2(torch.arange(-120, 121, device=GPU).float())
    above, below = (powers.nextafter(torch.tensor(end, device=GPU)) for end in (torch.inf, 0.0))
    rows = torch.cat([powers, above, below])[:, None] * torch.tensor([1.0, -0.3, 0.001], device=GPU)
    qdata, scales = quantize_rows(rows)
    expected, expected_scales = reference_quantize_rows(rows)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(qdata.float(), expected.float())


@pytest.mark.parametrize("width", NORM_WIDTHS)
@pytest.mark.parametrize("rows", [8192, 301, 1])
def test_norm_weight_gradient(rows: int, width: int) -> None:
    x, g, inverse = normal(rows, width), normal(rows, width), torch.rand(rows, device=GPU) + 0.5
    terms = g.double() * x.double() * inverse.double()[:, None]
    actual = rms_norm_weight_gradient(g, x, inverse, torch.float32)
    assert ((actual - terms.sum(0)).abs() <= 1e-6 * terms.abs().sum(0)).all()
    assert torch.equal(actual, rms_norm_weight_gradient(g, x, inverse, torch.float32))
    rounded = rms_norm_weight_gradient(g, x, inverse, torch.bfloat16)
    assert torch.equal(rounded, actual.bfloat16())
    wide = rms_norm_weight_gradient(g.float(), x.float(), inverse, torch.float32)
    torch.testing.assert_close(wide, actual, rtol=1e-5, atol=1e-3)


WEIGHTS = [(4096, 4096), (14336, 4096), (1024, 4096), (272, 80), (16, 16)]


@pytest.mark.parametrize("shape", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_weight_cast(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bitwise, in both layouts, with nothing written outside."""
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
    for weight, is_transposed in itertools.product(weights, BOTH):
        matrix = torch.full((columns, rows + 64) if is_transposed else (rows, columns + 64), 0x55, device=GPU).byte()
        inner = matrix[:, 16:-48]
        target = (inner.T if is_transposed else inner).view(E4M3)
        weight_to_e4m3(weight, scales, target)
        expected = torch.empty(shape, dtype=E4M3, device=GPU)
        reference_weight_to_e4m3(weight, scales[0], expected)
        assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
        inner.fill_(0x55)
        assert (matrix == 0x55).all()
    weights[0][rows // 2, 7] = torch.nan
    assert weight_scales(weights, 2).isnan().all()


@pytest.mark.parametrize("columns", [4096, 14336, 2048, 80, 16])
@pytest.mark.parametrize("rows", [8192, 1000, 37, 1])
def test_fp8_transpose(rows: int, columns: int) -> None:
    """Bitwise, except for the sign of zero."""
    codes = torch.randint(0, 256, (rows, columns + 64), dtype=torch.uint8, device=GPU)
    qdata = codes.view(E4M3)[:, :columns]
    moved = fp8_transpose(qdata, None)[0].view(torch.uint8)
    assert torch.equal(moved[:, :rows], codes[:, :columns].T)
    assert moved.shape == (columns, -(-rows // 16) * 16)
    assert not moved[:, rows:].any()
    codes[codes & 0x7F == 0x7F] = 0
    codes[:, 5] = 0
    codes[rows // 2, 9] = 0x7F
    factors = torch.exp2(torch.randint(-60, 10, (rows,), device=GPU).float())
    actual, scales = fp8_transpose(qdata, factors)
    expected = torch.empty_like(actual)
    expected_scales = reference_fp8_transpose(qdata, factors, expected)
    assert scales is not None
    assert expected_scales is not None
    assert scales.isnan().nonzero().tolist() == [[9]]
    assert not actual.view(torch.uint8)[:, rows:].any()
    others = torch.arange(columns, device=GPU) != 9
    assert torch.equal(scales[others], expected_scales[others])
    assert torch.equal(actual[others].float(), expected[others].float())


def test_trainable_weight_kernels_in_a_cuda_graph() -> None:
    """Nothing synchronizes, and accumulators are reset on replay."""
    weight, rows, factors = normal(256, 512), quantize_rows(normal(300, 512))[0], powers(300)
    matrix = torch.empty(512, 256, dtype=E4M3, device=GPU)

    def work() -> tuple[Tensor, Tensor, Tensor]:
        scales = weight_scales([weight], 16)
        weight_to_e4m3(weight, scales, matrix.T)
        moved, columns = fp8_transpose(rows, factors)
        assert columns is not None
        return scales, moved, columns

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    weight.mul_(2.0**-7)
    factors.mul_(2.0**-3)
    graph.replay()
    written = matrix.float()
    for ours, theirs in zip(captured, work(), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    assert torch.equal(written, matrix.float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_propagate(value: float) -> None:
    """In every e4m3 row that a kernel writes, and in the adapter gradients computed from it."""
    x, rows = normal(64, 4096), torch.arange(64, device=GPU)
    x[7, 3000] = value
    gate_up, g = normal(64, 2 * 14336), normal(64, 14336)
    g[7, 14000] = value
    heads = tuple(normal(64, count, 128) for count in (32, 8, 8))
    heads[1][7, 3, 100] = value
    identity_rope = torch.ones(64, 128, device=GPU).bfloat16(), torch.zeros(64, 128, device=GPU).bfloat16()
    normed = rms_norm(x, torch.ones(4096, device=GPU).bfloat16(), 1e-5)
    assert normed.scales is not None
    gradient = gated_activation_backward(g, gate_up)[1]
    assert gradient.scales is not None
    for qdata, scales in (
        quantize_rows(x),
        rope_backward_quantized((heads[0], heads[1], heads[2]), *identity_rope),
        (normed.qdata, normed.scales),
        (gradient.qdata, gradient.scales),
    ):
        real = qdata.float() * scales[:, None]
        assert real[7].isnan().all()
        assert real[rows != 7].isfinite().all()
        out = torch.zeros(16, qdata.shape[1], device=GPU)
        blocks = block_table([(0, qdata.shape[1], 0, 16)], GPU)
        grad_matmul = GradMatmul(left_operand(normal(64, 16), scales), scales, qdata, blocks, 16, None, out)
        adapter_gradients(grad_matmul, grad_matmul._replace(out=torch.zeros_like(out)))
        assert not out.isfinite().any()


def test_a_kernel_runs_on_the_gpu_of_its_arguments() -> None:
    """Not on the current one, which is another if a model is on the second GPU, or split over several."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = normal(64, 4096)
    expected = quantize_rows(x)
    assert torch.cuda.current_device() == 0
    for _ in range(2):  # the first launch compiles
        actual = quantize_rows(x.to("cuda:1"))
        assert all(ours.device.index == 1 for ours in actual)
        assert torch.equal(actual[0].cpu().float(), expected[0].cpu().float())
        assert torch.equal(actual[1].cpu(), expected[1].cpu())
