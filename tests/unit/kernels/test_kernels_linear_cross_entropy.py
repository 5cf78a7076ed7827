from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.linear_cross_entropy import (
    fp8_linear_cross_entropy,
    head,
    linear_cross_entropy,
    reference_linear_cross_entropy,
)


def inputs(
    dtype: torch.dtype, bias: bool = True, masked: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(37, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, 37, (2, 9), generator=generator)
    targets[0, :masked] = -100
    return hidden, weight, targets, offset


@pytest.fixture(params=[1, 37 * 4, 2**25], ids=["one token per chunk", "ragged chunks", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", request.param)
    monkeypatch.setattr(head, "TILES_CHUNK_FACTOR", 1)
    monkeypatch.setattr(head, "TRAINED_CHUNK_FACTOR", 1)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("masked", [0, 1, 4], ids=["all targets", "nearly all targets", "some targets"])
@pytest.mark.parametrize("count_given", [True, False], ids=["count given", "count computed"])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_match_reference(bias: bool, count_given: bool, masked: int) -> None:
    ours, theirs = inputs(torch.float64, bias, masked), inputs(torch.float64, bias, masked)
    loss = linear_cross_entropy(*ours, target_count=18 - masked if count_given else None)
    expected = reference_linear_cross_entropy(*theirs)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    (loss * 0.37).backward()
    (expected * 0.37).backward()
    for actual, reference in ((ours[0], theirs[0]), (ours[1], theirs[1]), (ours[3], theirs[3])):
        if actual is not None and reference is not None:
            torch.testing.assert_close(actual.grad, reference.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("chunk")
def test_numeric_gradient() -> None:
    hidden, weight, targets, bias = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, targets, b), (hidden, weight, bias))


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[0, :4].any(), "tokens without a target must have no gradient"
    assert hidden.grad[1].any()


def test_no_targets_gives_zero_loss() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_bf16_stays_close_to_float64() -> None:
    ours, exact = inputs(torch.bfloat16, bias=False), inputs(torch.float64, bias=False)
    actual, reference = linear_cross_entropy(*ours), reference_linear_cross_entropy(*exact)
    actual.backward()
    reference.backward()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), reference, rtol=1e-2, atol=0)
    assert ours[0].grad is not None
    assert exact[0].grad is not None
    error = (ours[0].grad.double() - exact[0].grad).norm() / exact[0].grad.norm()
    assert error < 2e-2


def test_autocast_computes_in_its_dtype() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    fp8_loss = linear_cross_entropy(hidden.bfloat16(), weight, targets)
    assert loss == fp8_loss
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_no_grad_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    expected = float(reference_linear_cross_entropy(hidden.detach(), weight.detach(), targets))
    for name in ("empty_like", "zeros_like"):
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("allocated a gradient"))
    monkeypatch.setattr(head, "transposed", lambda *a: pytest.fail("transposed the head"))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
        qdata, scale = quantized(weight)
        fp8_loss = fp8_linear_cross_entropy(hidden, qdata, scale, targets)
    assert not loss.requires_grad
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(fp8_loss) == pytest.approx(expected, rel=2e-2)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and the per-tensor scale."""
    scale = weight.detach().abs().max() / 448
    return (weight.detach() / scale).to(E4M3), scale


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("masked", [0, 1, 4], ids=["all targets", "nearly all targets", "some targets"])
@pytest.mark.parametrize("count_given", [True, False], ids=["count given", "count computed"])
def test_fp8_head(count_given: bool, masked: int) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, masked=masked)
    codes, scales = reference_quantize_rows(hidden.detach().flatten(0, 1))
    theirs = (codes.float() * scales[:, None]).view_as(hidden).requires_grad_()
    qdata, scale = quantized(weight)
    loss = fp8_linear_cross_entropy(hidden, qdata, scale, targets, 18 - masked if count_given else None)
    expected = reference_linear_cross_entropy(theirs, qdata.float() * scale, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    (loss * 0.37).backward()
    (expected * 0.37).backward()
    assert hidden.grad is not None
    assert theirs.grad is not None
    assert (hidden.grad - theirs.grad).norm() / theirs.grad.norm() < 0.05  # e5m2 has two bits of mantissa
    assert not hidden.grad[0, :masked].any()


def test_fp8_head_keeps_gradients_of_improbable_tokens() -> None:
    """Thousands of tokens with a probability around 1e-7 each, whose weights share a direction: each gradient is small
    next to the label's, but they are the only contribution along that direction."""
    vocabulary, width = 20_000, 16
    weight = torch.zeros(vocabulary, width)
    weight[:, 0] = -16.0
    weight[:2, 0], weight[0, 1], weight[1, 1] = 0.0, 1.0, -1.0
    hidden = torch.zeros(1, 1, width)
    hidden[0, 0, 0] = 1.0
    fp8_loss, wide = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    targets = torch.zeros(1, 1, dtype=torch.int64)
    fp8_linear_cross_entropy(fp8_loss, *quantized(weight), targets).backward()
    reference_linear_cross_entropy(wide, weight, targets).backward()
    assert fp8_loss.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(fp8_loss.grad[0, 0, 0], wide.grad[0, 0, 0], rtol=0.15, atol=0)


@pytest.mark.parametrize("fp8", [False, True])
def test_all_chunks_share_one_buffer(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 37 * 4)
    monkeypatch.setattr(head, "TILES_CHUNK_FACTOR", 1)
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    seen: list[tuple[int, ...]] = []
    softmax = head.softmax

    def record_buffers(logits: torch.Tensor, *others: Any) -> None:
        seen.append(tuple(t.data_ptr() for t in (logits, *others[2:]) if isinstance(t, torch.Tensor)))
        softmax(logits, *others)

    monkeypatch.setattr(head, "softmax", record_buffers)
    if fp8:
        fp8_linear_cross_entropy(hidden, *quantized(weight), targets)
    else:
        linear_cross_entropy(hidden, weight.detach(), targets)
    assert len(seen) == 4
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("vocabulary", "width", "tokens"),
    [(128_256, 4096, 512), (128_256, 2048, 1024), (151_936, 2560, 768), (262_208, 2560, 768), (151_936, 896, 1664),
     (32_768, 4096, 2048), (128_256, 16384, 512)],
)  # fmt: skip
def test_chunks_of_an_fp8_head_have_a_tile_per_sm(vocabulary: int, width: int, tokens: int) -> None:
    """As many tokens as make 128 tiles of 128 x 128, of at most 512 MiB of logits."""
    assert head.chunk_rows(vocabulary, trained=False, fp8_width=width) == tokens
    base = head.chunk_rows(vocabulary, trained=False)
    assert tokens * vocabulary <= max(2**28, base * vocabulary)
    deferred = head.deferred_count(vocabulary, width) * tokens
    assert tokens <= deferred <= max(tokens, head.DEFERRED_CHUNKS * base)
