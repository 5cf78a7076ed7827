from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3, E5M2
from pantheraml.kernels.linear_cross_entropy import (
    fp8_linear_cross_entropy,
    head,
    linear_cross_entropy,
    reference_linear_cross_entropy,
    triton_kernel,
)
from pantheraml.kernels.linear_cross_entropy.softmax import Scores, reference_softmax, softmax
from pantheraml.kernels.token_scores import fp8_token_scores, reference_token_scores, token_scores
from tests.interpreter.comparison import assert_close, assert_same_codes

COLUMNS = 200


@pytest.fixture(params=[8192, 64], ids=["whole rows", "blocks"], autouse=True)
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_BLOCK", request.param)


def inputs() -> tuple[Tensor, Tensor]:
    """Flat and peaked rows, also far from zero; labels that are the top token, tied for it, or ignored."""
    logits = torch.randn(9, COLUMNS) * 2 ** torch.linspace(-3, 4, 9)[:, None] + torch.linspace(-30, 30, 9)[:, None]
    labels = torch.randint(0, COLUMNS, (9,))
    labels[[2, 5]] = torch.tensor([-100, -1])
    labels[3:5] = logits[3:5].argmax(dim=1)
    logits[6, 7] = logits[6, labels[6]] = logits[6].max()
    logits[5, 3] = float("nan")  # an ignored token: padding may contain anything
    return logits, labels


def check_softmax(form: str, details: bool) -> None:
    logits, labels = inputs()
    actual, expected = (Scores.empty(logits, details=details) for _ in range(2))
    scales, their_scales = torch.empty(2, 9) if form == "e5m2" else (None, None)
    theirs = torch.empty(logits.shape, dtype=E5M2 if form == "e5m2" else torch.float32)
    reference_softmax(logits, labels, expected, theirs, their_scales)
    match form:
        case "no gradient":
            softmax(logits, labels, actual)
        case "in place":
            softmax(logits, labels, actual, logits)
            assert_close(logits, theirs)
        case "e5m2":
            assert scales is not None
            assert their_scales is not None
            ours = torch.empty_like(theirs)
            softmax(logits, labels, actual, ours, scales)
            torch.testing.assert_close(scales, their_scales, rtol=1e-5, atol=0)
            assert_same_codes(ours, theirs)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-6, atol=1e-5)
    assert not actual.losses[[2, 5]].any()
    if actual.details is not None and expected.details is not None:
        torch.testing.assert_close(actual.details.entropy, expected.details.entropy, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(actual.details.mean_logits, expected.details.mean_logits, rtol=1e-6, atol=1e-5)
        assert torch.equal(actual.details.is_top1, expected.details.is_top1)
        assert actual.details.is_top1[[3, 4, 6]].all()


@pytest.mark.parametrize("form", ["no gradient", "in place", "e5m2"])
@pytest.mark.parametrize("details", [False, True])
def test_scores_and_gradient(form: str, details: bool) -> None:
    check_softmax(form, details)


def test_label_beyond_the_vocabulary_gives_nan() -> None:
    scores = Scores.empty(torch.empty(2, 1), details=False)
    softmax(torch.zeros(2, COLUMNS), torch.tensor([COLUMNS, 0]), scores)
    assert scores.losses[0].isnan()
    assert not scores.losses[1].isnan()


@pytest.mark.parametrize("largest", [57346.0, 57000.0])
def test_small_error_is_detected(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_E5M2_MAX", tl.constexpr(largest))
    with pytest.raises(AssertionError):
        check_softmax("e5m2", details=False)


def test_nan_logit_reaches_the_gradient() -> None:
    logits = torch.zeros(1, COLUMNS)
    logits[0, 5] = float("nan")
    gradient, scales = torch.empty(1, COLUMNS, dtype=E5M2), torch.empty(1)
    softmax(logits, torch.tensor([0]), Scores.empty(logits, details=False), gradient, scales)
    assert (gradient.float() * scales[:, None]).isnan().any()


def head_inputs(masked: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(2, 20, 32).requires_grad_()
    targets = torch.randint(0, 80, (2, 20))
    targets[0, :masked] = -100
    return hidden, torch.randn(80, 32) / 4, targets


@pytest.mark.parametrize("masked", [0, 2, 15], ids=["all targets", "nearly all targets", "some targets"])
def test_dense_head(masked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 80 * 7)
    hidden, weight, targets = head_inputs(masked)
    theirs = hidden.detach().clone().requires_grad_()
    loss, scores = linear_cross_entropy(hidden, weight, targets), token_scores(hidden, weight, targets)
    (loss - 0.3 * scores.log_probs.sum()).backward()
    expected, reference = (
        reference_linear_cross_entropy(theirs, weight, targets),
        reference_token_scores(theirs, weight, targets),
    )
    (expected - 0.3 * reference[0].sum()).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for actual, other in zip(scores, reference, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(hidden.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [2, 15], ids=["nearly all targets", "some targets"])
def test_fp8_head(masked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 80 * 7)
    hidden, weight, targets = head_inputs(masked)
    theirs = hidden.detach().clone().requires_grad_()
    scale = weight.abs().max() / 448
    qdata = (weight / scale).to(E4M3)
    loss, scores = (op(hidden, qdata, scale, targets) for op in (fp8_linear_cross_entropy, fp8_token_scores))
    (loss - 0.3 * scores.log_probs.sum()).backward()
    expected = reference_linear_cross_entropy(theirs, weight, targets)
    (1.3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(loss, -scores.log_probs.sum(), rtol=1e-6, atol=0)
    assert hidden.grad is not None
    assert theirs.grad is not None
    assert (hidden.grad - theirs.grad).norm() / theirs.grad.norm() < 0.05


@pytest.mark.parametrize("shape", [(3, 5), (0, 5), (1, 4096), (33, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_scaled_in_float32(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient, factor = torch.randn(shape).to(dtype), torch.tensor(0.3)
    for given in (gradient, gradient.T):
        assert torch.equal(head.scale_gradient(given, factor, torch.float32), given.float() * factor)
        by_row = torch.randn(given.shape[0], 1)
        assert torch.equal(head.scale_gradient(given, by_row, torch.float32), given.float() * by_row)
