from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.fp8.quantize_rows import reference_quantize_rows
from pantheraml.kernels.linear_cross_entropy import head
from pantheraml.kernels.token_scores import DeferredGrad, fp8_token_scores, reference_token_scores, token_scores


def inputs(
    dtype: torch.dtype, *, bias: bool = True, trained: bool = True, masked: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(trained)
    offset = torch.randn(37, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(trained)
    targets = torch.randint(0, 37, (2, 9), generator=generator)
    targets[0, :masked] = -100
    with torch.no_grad():  # make some targets the most likely token
        best = (hidden @ weight.T + offset).argmax(-1)
    targets[1, 2:5] = best[1, 2:5]
    return hidden, weight, targets, offset if bias else None


UNEQUAL = torch.linspace(-1, 2, 18, dtype=torch.float64).view(2, 9)
EQUAL = torch.full((2, 9), 0.37, dtype=torch.float64)


@pytest.fixture(params=[1, 37 * 4, 2**25], ids=["one token per chunk", "ragged chunks", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", request.param)
    monkeypatch.setattr(head, "TILES_CHUNK_FACTOR", 1)
    monkeypatch.setattr(head, "TRAINED_CHUNK_FACTOR", 1)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("token_weights", [EQUAL, UNEQUAL], ids=["mean", "weighted"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize(("bias", "masked"), [(True, 4), (False, 4), (True, 1)])
def test_scores_and_gradients_match_reference(bias: bool, masked: int, trained: bool, token_weights: Tensor) -> None:
    ours = inputs(torch.float64, bias=bias, trained=trained, masked=masked)
    theirs = inputs(torch.float64, bias=bias, trained=trained, masked=masked)
    scores, reference = token_scores(*ours), reference_token_scores(*theirs)
    (scores.log_probs * token_weights).sum().backward()
    (reference[0] * token_weights).sum().backward()
    for actual, other in zip(scores, reference, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)
    assert 3 <= int(scores.is_top1.sum()) < 14
    for actual, other in ((ours[0], theirs[0]), (ours[1], theirs[1]), (ours[3], theirs[3])):
        if isinstance(actual, Tensor) and isinstance(other, Tensor):
            torch.testing.assert_close(actual.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_numeric_gradient() -> None:
    hidden, weight, targets, bias = inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_scores(h, w, targets, b).log_probs * UNEQUAL, (hidden, weight, bias)
    )


def test_frozen_head_and_ignored_tokens_get_no_gradient() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False)
    token_scores(hidden, weight, targets).log_probs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[0, :4].any()
    assert hidden.grad[1].any()


@pytest.mark.parametrize("trained", [True, False])
def test_no_targets_gives_differentiable_zero(trained: bool) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, trained=trained)
    scores = token_scores(hidden, weight, torch.full_like(targets, -100))
    scores.log_probs.sum().backward()
    assert not scores.log_probs.any()
    assert not scores.is_top1.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_autocast_uses_bf16_matmuls_and_float32_scores() -> None:
    hidden, weight, targets, bias = inputs(torch.float32)
    exact = token_scores(hidden, weight, targets, bias).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(hidden, weight, targets, bias)
    assert scores.log_probs.dtype == torch.float32
    assert not torch.equal(scores.log_probs, exact)
    torch.testing.assert_close(scores.log_probs, exact, rtol=0.02, atol=0.1)
    scores.log_probs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("masked", [1, 4], ids=["nearly all targets", "some targets"])
def test_fp8_head(masked: int) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=masked)
    codes, scales = reference_quantize_rows(hidden.detach().flatten(0, 1))
    theirs = (codes.float() * scales[:, None]).view_as(hidden).requires_grad_()
    qdata, scale = quantized(weight)
    scores = fp8_token_scores(hidden, qdata, scale, targets, target_count=18 - masked)
    reference = reference_token_scores(theirs, qdata.float() * scale, targets)
    torch.testing.assert_close(scores.log_probs, reference[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, reference[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.is_top1, reference[2])
    (scores.log_probs * UNEQUAL).sum().backward()
    (reference[0] * UNEQUAL).sum().backward()
    assert hidden.grad is not None
    assert theirs.grad is not None
    assert (hidden.grad - theirs.grad).norm() / theirs.grad.norm() < 0.05  # e5m2 has two bits of mantissa
    assert not hidden.grad[0, :masked].any()


def test_weights_of_ignored_tokens_have_no_effect() -> None:
    ours, theirs = (inputs(torch.float64, bias=False, masked=1) for _ in range(2))
    token_weights = EQUAL.clone()
    token_scores(*ours).log_probs.backward(token_weights)
    token_weights[0, 0] = 1e9
    token_scores(*theirs).log_probs.backward(token_weights)
    assert ours[0].grad is not None
    for actual, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(actual.grad, other.grad)


def test_tie_counts_as_top1() -> None:
    weight = torch.tensor([[1.0], [1.0], [0.5]])
    scores = token_scores(torch.ones(1, 3, 1), weight, torch.tensor([[0, 1, 2]]))
    assert scores.is_top1.tolist() == [[True, True, False]]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("masked", [1, 4], ids=["nearly all targets", "some targets"])
@pytest.mark.parametrize("called_early", [True, False], ids=["called early", "in the backward pass"])
def test_deferred_gradients_match(called_early: bool, masked: int) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=masked)
    arguments = hidden, *quantized(weight), targets, 18 - masked
    expected = torch.autograd.grad((fp8_token_scores(*arguments).log_probs * UNEQUAL).sum(), hidden)[0]
    deferred = DeferredGrad()
    scores = fp8_token_scores(*arguments, deferred)
    deferred_rows = deferred.rows() if called_early else None
    assert deferred_rows is None or 1 <= len(deferred_rows) <= 18
    loss = (scores.log_probs * UNEQUAL).sum()
    for _ in range(2):  # twice, as with retain_graph
        actual = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_deferred_gradients_are_not_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved-tensor hooks (such as offloading) must not copy gradients that are not computed yet."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 37 * 2)
    monkeypatch.setattr(head, "TILES_CHUNK_FACTOR", 1)
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=1)
    arguments = hidden, *quantized(weight), targets, 17
    expected = torch.autograd.grad(fp8_token_scores(*arguments).log_probs.sum(), hidden)[0]
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        scores = fp8_token_scores(*arguments, DeferredGrad())
    torch.testing.assert_close(torch.autograd.grad(scores.log_probs.sum(), hidden)[0], expected, rtol=1e-5, atol=1e-6)


def test_deferred_gradients_ignore_autocast() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=1)
    actual = []
    for called_early in (True, False):
        deferred = DeferredGrad()
        with torch.autocast("cpu", torch.bfloat16):
            scores = fp8_token_scores(hidden, *quantized(weight), targets, 17, deferred)
            if called_early:
                deferred.rows()
        actual.append(torch.autograd.grad(scores.log_probs.sum(), hidden)[0])
    assert torch.equal(*actual)


def test_nothing_is_deferred_under_no_grad() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=1)
    deferred = DeferredGrad()
    with torch.no_grad():
        fp8_token_scores(hidden, *quantized(weight), targets, 17, deferred)
    assert deferred.rows() is None
