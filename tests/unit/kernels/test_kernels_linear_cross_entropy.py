from __future__ import annotations

import pytest
import torch

from pantheraml.kernels.linear_cross_entropy import linear_cross_entropy, op, reference_linear_cross_entropy


def inputs(
    dtype: torch.dtype, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(37, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(37, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, 37, (2, 9), generator=generator)
    targets[0, :4] = -100
    return hidden, weight, targets, offset


@pytest.fixture(params=[1, 37 * 4, 2**25], ids=["one token a chunk", "ragged chunks", "one chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "CHUNK_ELEMENTS", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_equal_the_reference(bias: bool) -> None:
    ours, theirs = inputs(torch.float64, bias), inputs(torch.float64, bias)
    (linear_cross_entropy(*ours) * 0.37).backward()
    (reference_linear_cross_entropy(*theirs) * 0.37).backward()
    for mine, reference in ((ours[0], theirs[0]), (ours[1], theirs[1]), (ours[3], theirs[3])):
        if mine is not None and reference is not None:
            torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("chunk")
def test_numeric_gradient() -> None:
    hidden, weight, targets, bias = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda h, w, b: linear_cross_entropy(h, w, targets, b), (hidden, weight, bias))


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_do() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    weight.requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets).backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert not hidden.grad[0, :4].any(), "tokens without a target have no gradient"
    assert hidden.grad[1].any()


def test_no_targets_at_all_is_a_loss_of_zero() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_bf16_stays_close_to_float64() -> None:
    ours, exact = inputs(torch.bfloat16, bias=False), inputs(torch.float64, bias=False)
    mine, reference = linear_cross_entropy(*ours), reference_linear_cross_entropy(*exact)
    mine.backward()
    reference.backward()
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), reference, rtol=1e-2, atol=0)
    assert ours[0].grad is not None
    assert exact[0].grad is not None
    error = (ours[0].grad.double() - exact[0].grad).norm() / exact[0].grad.norm()
    assert error < 2e-2


def test_autocast_computes_in_its_dtype() -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    narrow = linear_cross_entropy(hidden.bfloat16(), weight, targets)
    assert loss == narrow
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_without_gradients_no_gradient_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = inputs(torch.float32, bias=False)
    monkeypatch.setattr(torch, "mm", lambda *a, **k: pytest.fail("a product for the backward pass"))
    monkeypatch.setattr(torch, "zeros_like", lambda *a, **k: pytest.fail("room for a weight gradient"))
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad
