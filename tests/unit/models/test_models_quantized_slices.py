"""A quantized layer sliced to some outputs or inputs keeps its values there, in its own memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.nf4.format import BLOCK, SCALE_BLOCK
from pantheraml.models.quantize.fp8 import FP8Linear
from pantheraml.models.quantize.nf4 import NF4Linear
from pantheraml.models.quantize.quantized_linear import QuantFormat, QuantizedLinear, quantize_linear
from pantheraml.parallel.tensor import QuantizedLayer

OUT, IN = 6, 4 * BLOCK
QUANT_FORMATS: list[QuantFormat] = ["fp8", "int8", "nf4"]


def make(quant_format: QuantFormat, out: int = OUT, width: int = IN) -> QuantizedLinear:
    torch.manual_seed(0)
    # rows of different magnitude, so that a wrong scale is noticed
    weight = torch.randn(out, width) * torch.logspace(-2, 1, out)[:, None]
    return quantize_linear(quant_format, weight, torch.randn(out))


def values(layer: QuantizedLinear) -> Tensor:
    if isinstance(layer, FP8Linear):
        return layer.qweight.float() * layer.scale[:, None]
    return layer.dequantize()


def held(layer: nn.Module) -> int:
    return sum(buffer.untyped_storage().nbytes() for buffer in layer.buffers())


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
@pytest.mark.parametrize("part", [slice(0, 3), slice(3, 6), slice(4, 5)])
def test_rows(quant_format: QuantFormat, part: slice) -> None:
    whole, cut = make(quant_format), make(quant_format)
    assert isinstance(cut, QuantizedLayer)
    cut.keep_rows(part)
    assert torch.equal(values(cut), values(whole)[part])
    assert cut.out_features == part.stop - part.start
    x = torch.randn(2, 3, IN)
    # the summation order of the fp8 matmul reference depends on the sizes
    torch.testing.assert_close(cut(x), whole(x)[..., part], rtol=1e-5, atol=1e-5)
    assert held(cut) < 0.6 * held(whole)


@pytest.mark.parametrize("quant_format", QUANT_FORMATS)
@pytest.mark.parametrize("part", [slice(0, 2 * BLOCK), slice(2 * BLOCK, 4 * BLOCK), slice(BLOCK, 2 * BLOCK)])
def test_columns(quant_format: QuantFormat, part: slice) -> None:
    whole, cut = make(quant_format), make(quant_format)
    cut.keep_columns(part)
    assert torch.equal(values(cut), values(whole)[:, part])
    assert cut.in_features == part.stop - part.start
    assert cut.bias is not None
    assert whole.bias is not None
    assert torch.equal(cut.bias, whole.bias)
    x = torch.zeros(2, IN)
    x[:, part] = torch.randn(2, part.stop - part.start)
    torch.testing.assert_close(cut(x[:, part]), whole(x), rtol=1e-5, atol=1e-5)
    assert held(cut) < 0.65 * held(whole)


def test_nf4_scales_stay_quantized_at_a_group_boundary() -> None:
    width = BLOCK * SCALE_BLOCK // 2  # two rows share a second-level scale
    whole = make("nf4", 4, width)
    for part, quantized in ((slice(2, 4), True), (slice(1, 3), False)):
        cut = make("nf4", 4, width)
        assert isinstance(cut, NF4Linear)
        cut.keep_rows(part)
        assert torch.equal(values(cut), values(whole)[part])
        assert (cut.scale_code.dtype == torch.uint8) is quantized
        assert (cut.scale_step is not None) is quantized


def test_a_slice_through_an_nf4_block_is_rejected() -> None:
    narrow = make("nf4", 6, BLOCK // 2)
    with pytest.raises(UnsupportedModelError, match="3 outputs of 32 inputs"):
        narrow.keep_rows(slice(0, 3))
    with pytest.raises(UnsupportedModelError, match="block of 64"):
        make("nf4").keep_columns(slice(0, BLOCK // 2))
    before = values(narrow)
    narrow.keep_rows(slice(0, 2))
    assert torch.equal(values(narrow), before[:2])
