from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pantheraml.kernels.linear_cross_entropy import head
from pantheraml.kernels.quantise_rows import reference_quantise_rows
from pantheraml.kernels.token_scores import Later, fp8_token_scores, reference_token_scores, token_scores


def inputs(
    dtype: torch.dtype, *, bias: bool = True, trained: bool = True, masked: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(trained)
    offset = torch.randn(37, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(trained)
    targets = torch.randint(0, 37, (2, 9), generator=generator)
    targets[0, :masked] = -100
    with torch.no_grad():  # some targets that are the likeliest token
        best = (hidden @ weight.T + offset).argmax(-1)
    targets[1, 2:5] = best[1, 2:5]
    return hidden, weight, targets, offset if bias else None


UNEVEN = torch.linspace(-1, 2, 18, dtype=torch.float64).view(2, 9)
EVEN = torch.full((2, 9), 0.37, dtype=torch.float64)


@pytest.fixture(params=[1, 37 * 4, 2**25], ids=["one token a chunk", "ragged chunks", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", request.param)
    monkeypatch.setattr(head, "TRAINED_CHUNKS", 1)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("by_token", [EVEN, UNEVEN], ids=["mean", "weighed"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize(("bias", "masked"), [(True, 4), (False, 4), (True, 1)])
def test_scores_and_gradients_equal_the_reference(bias: bool, masked: int, trained: bool, by_token: Tensor) -> None:
    ours = inputs(torch.float64, bias=bias, trained=trained, masked=masked)
    theirs = inputs(torch.float64, bias=bias, trained=trained, masked=masked)
    scores, reference = token_scores(*ours), reference_token_scores(*theirs)
    (scores.log_probs * by_token).sum().backward()
    (reference[0] * by_token).sum().backward()
    for mine, other in zip(scores, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    assert 3 <= int(scores.is_top1.sum()) < 14
    for mine, other in ((ours[0], theirs[0]), (ours[1], theirs[1]), (ours[3], theirs[3])):
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_numeric_gradient() -> None:
    hidden, weight, targets, bias = inputs(torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_scores(h, w, targets, b).log_probs * UNEVEN, (hidden, weight, bias)
    )


def test_a_frozen_head_gets_no_gradient_and_unscored_tokens_neither() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False)
    token_scores(hidden, weight, targets).log_probs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[0, :4].any()
    assert hidden.grad[1].any()


@pytest.mark.parametrize("trained", [True, False])
def test_no_targets_at_all_is_a_differentiable_zero(trained: bool) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, trained=trained)
    scores = token_scores(hidden, weight, torch.full_like(targets, -100))
    scores.log_probs.sum().backward()
    assert not scores.log_probs.any()
    assert not scores.is_top1.any()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_under_autocast_the_products_are_in_bf16_and_the_scores_in_float32() -> None:
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
@pytest.mark.parametrize("masked", [1, 4], ids=["nearly all count", "some count"])
def test_a_head_in_fp8(masked: int) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=masked)
    codes, scales = reference_quantise_rows(hidden.detach().flatten(0, 1))
    theirs = (codes.float() * scales[:, None]).view_as(hidden).requires_grad_()
    payload, scale = packed(weight)
    scores = fp8_token_scores(hidden, payload, scale, targets, target_count=18 - masked)
    reference = reference_token_scores(theirs, payload.float() * scale, targets)
    torch.testing.assert_close(scores.log_probs, reference[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, reference[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.is_top1, reference[2])
    (scores.log_probs * UNEVEN).sum().backward()
    (reference[0] * UNEVEN).sum().backward()
    assert hidden.grad is not None
    assert theirs.grad is not None
    assert (hidden.grad - theirs.grad).norm() / theirs.grad.norm() < 0.05  # e5m2 has two bits of mantissa
    assert not hidden.grad[0, :masked].any()


def test_weights_of_tokens_that_do_not_count_change_nothing() -> None:
    ours, theirs = (inputs(torch.float64, bias=False, masked=1) for _ in range(2))
    by_token = EVEN.clone()
    token_scores(*ours).log_probs.backward(by_token)
    by_token[0, 0] = 1e9
    token_scores(*theirs).log_probs.backward(by_token)
    assert ours[0].grad is not None
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_tie_is_a_hit() -> None:
    weight = torch.tensor([[1.0], [1.0], [0.5]])
    scores = token_scores(torch.ones(1, 3, 1), weight, torch.tensor([[0, 1, 2]]))
    assert scores.is_top1.tolist() == [[True, True, False]]


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("masked", [1, 4], ids=["nearly all count", "some count"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "in the backward pass"])
def test_gradients_that_are_left_for_later_are_the_same(asked: bool, masked: int) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=masked)
    arguments = hidden, *packed(weight), targets, 18 - masked
    wanted = torch.autograd.grad((fp8_token_scores(*arguments).log_probs * UNEVEN).sum(), hidden)[0]
    later = Later()
    scores = fp8_token_scores(*arguments, later)
    left = later.rows() if asked else None
    assert left is None or 1 <= len(left) <= 18
    loss = (scores.log_probs * UNEVEN).sum()
    for _ in range(2):  # and a second time, if somebody keeps the graph
        found = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_is_left_for_later_is_nothing_that_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who moves saved tensors elsewhere in the meantime has not moved gradients that nobody had formed."""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", 37 * 2)
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=1)
    arguments = hidden, *packed(weight), targets, 17
    wanted = torch.autograd.grad(fp8_token_scores(*arguments).log_probs.sum(), hidden)[0]
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        scores = fp8_token_scores(*arguments, Later())
    torch.testing.assert_close(torch.autograd.grad(scores.log_probs.sum(), hidden)[0], wanted, rtol=1e-5, atol=1e-6)


def test_what_is_left_for_later_knows_no_autocast() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=1)
    found = []
    for asked in (True, False):
        later = Later()
        with torch.autocast("cpu", torch.bfloat16):
            scores = fp8_token_scores(hidden, *packed(weight), targets, 17, later)
            if asked:
                later.rows()
        found.append(torch.autograd.grad(scores.log_probs.sum(), hidden)[0])
    assert torch.equal(*found)


def test_nothing_is_left_where_nobody_wants_gradients() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False, trained=False, masked=1)
    later = Later()
    with torch.no_grad():
        fp8_token_scores(hidden, *packed(weight), targets, 17, later)
    assert later.rows() is None
