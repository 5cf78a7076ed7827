"""A loss that was sent ahead is a loss like any other, only that questions about it do not go to its device."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.models.read_ahead import (
    ReadAhead,
    came_from,
    copy_ahead,
    metrics_ahead,
    on_host,
    read_ahead,
    remembered,
)


def loss_of(values: list[float]) -> tuple[Tensor, Tensor]:
    """A mean as trainers make it of token scores, and the leaf that it depends on."""
    leaf = torch.tensor(values, requires_grad=True)
    scores = read_ahead(leaf * 1.0)
    return -scores.sum() / torch.as_tensor(len(values)).clamp(min=1), leaf


def overwrite(tensor: Tensor, value: float) -> None:
    """Change what lies on the device, unseen: whoever reads it there finds `value`."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data.fill_(value)


def test_questions_do_not_go_to_the_device() -> None:
    loss, _ = loss_of([1.0, 3.0])
    loss.backward()
    seen = loss.detach()
    overwrite(loss, float("nan"))
    for question in (torch.isnan, torch.isinf, Tensor.isnan):
        assert not question(seen)
    assert torch.isfinite(seen)
    assert seen.item() == float(seen) == seen.tolist() == -2.0
    assert f"{seen:.1f}" == "-2.0"
    assert (seen + 0).isnan(), "what the device has is still what is computed with"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_the_answers_are_right(value: float) -> None:
    loss, _ = loss_of([value, 0.0])
    plain = torch.tensor([value, 0.0])
    plain = -plain.sum() / 2
    for question in (torch.isnan, torch.isinf, torch.isfinite):
        answer = question(loss.detach())
        assert bool(answer) == bool(question(plain))
        assert answer.dtype == torch.bool
        assert torch.equal(answer, question(plain))
        assert torch.equal(torch.where(answer, 1.0, 2.0), torch.where(question(plain), 1.0, 2.0))


def test_gradients_are_those_of_a_plain_loss() -> None:
    loss, leaf = loss_of([1.0, 3.0, 5.0])
    ((loss * 2 + 1) ** 2).backward()
    plain_leaf = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
    plain = -plain_leaf.sum() / 3
    ((plain * 2 + 1) ** 2).backward()
    assert leaf.grad is not None
    assert plain_leaf.grad is not None
    torch.testing.assert_close(leaf.grad, plain_leaf.grad, rtol=0, atol=0)


def test_what_is_computed_on_the_way_is_sent_too() -> None:
    loss, _ = loss_of([1.0, 3.0])
    for derived, expected in ((loss / 4, -0.5), (loss * 2, -4.0), (3 * loss, -6.0), (loss + loss, -4.0)):
        assert type(derived) is ReadAhead
        overwrite(derived, 7.0)
        assert derived.item() == expected


@pytest.mark.parametrize("through", ["itself", "what was detached", "a view"])
def test_a_change_in_place_counts(through: str) -> None:
    loss, _ = loss_of([1.0, 3.0])
    seen = loss.detach()
    target = {"itself": seen, "what was detached": loss.detach(), "a view": seen.view(1)}[through]
    with torch.no_grad():
        target.mul_(float("nan"))
    assert torch.isnan(seen)
    assert torch.isnan(loss)
    loss, _ = loss_of([1.0, 3.0])
    same = loss
    loss *= 3
    assert loss is same
    overwrite(loss, 7.0)
    assert loss.item() == -6.0


def test_a_detached_loss_can_be_a_leaf() -> None:
    """For those who compute gradients in two parts."""
    loss, _ = loss_of([1.0, 3.0])
    leaf = loss.detach().requires_grad_()
    (leaf**2).backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == -4.0


def test_sums_of_losses_are_plain() -> None:
    """A trainer's running sum lives long, and asks nothing."""
    loss, _ = loss_of([1.0, 3.0])
    total = torch.tensor(1.0)
    total += loss.detach()
    assert type(total) is Tensor
    assert total.item() == -1.0


def test_it_is_printed_copied_and_saved_as_a_plain_tensor() -> None:
    loss, _ = loss_of([1.0, 3.0])
    seen = loss.detach()
    assert repr(seen) == "tensor(-2.)"
    stored = io.BytesIO()
    torch.save({"loss": seen}, stored)
    stored.seek(0)
    others: list[Any] = [copy.deepcopy(seen), pickle.loads(pickle.dumps(seen)), torch.load(stored)["loss"]]
    for other in others:
        assert type(other) is Tensor
        assert other.item() == -2.0


def test_without_a_gradient_nothing_is_sent() -> None:
    assert type(read_ahead(torch.ones(3))) is Tensor
    with torch.inference_mode():
        loss, _ = loss_of([1.0, 3.0])
        assert type(loss) is Tensor
    loss, _ = loss_of([1.0, 3.0])
    with torch.inference_mode():
        assert not torch.isnan(loss)


def test_a_copy_is_of_the_moment() -> None:
    tensor = torch.ones(2)
    read = copy_ahead(tensor)
    tensor.zero_()
    assert read().tolist() == [1.0, 1.0]


def test_autograd_meets_no_more_than_with_a_plain_loss() -> None:
    def names(tensor: Tensor) -> list[str]:
        node, found = tensor.grad_fn, []
        while node is not None:
            found.append(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        return found

    x = torch.randn(4, requires_grad=True)
    assert names(-read_ahead(x * 2).sum() / 3) == names(-(x * 2).sum() / 3)


def test_tensors_that_take_it_in_stay_what_they_are() -> None:
    loss = read_ahead(torch.ones(2, requires_grad=True).sum())
    parameter, leaf = torch.nn.Parameter(torch.zeros(())), torch.zeros((), requires_grad=True)
    with torch.no_grad():
        assert parameter.copy_(loss) is parameter
        leaf.copy_(loss)
    assert leaf.to(loss) is leaf
    assert leaf.type_as(loss) is leaf
    base = torch.ones(3, requires_grad=True) * 2
    assert read_ahead(base[1])._base is base
    assert [type(each) for each in (parameter, leaf, base)] == [torch.nn.Parameter, Tensor, Tensor]
    leaf.data.fill_(9)
    assert (parameter.item(), leaf.item()) == (2, 9)


def test_nothing_is_sent_where_several_processes_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives change a loss in place, unseen."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loss, _ = loss_of([1.0, 3.0])
    assert type(loss) is Tensor
    overwrite(loss, 6.0)
    assert loss.detach().item() == 6.0


def test_what_a_power_of_two_scales_is_known_without_asking_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = loss_of([1.0, 3.0])
    sent: list[Tensor] = []
    monkeypatch.setattr(
        "pantheraml.models.read_ahead.copy_ahead", lambda tensor: sent.append(tensor) or copy_ahead(tensor)
    )
    scaled = [loss * 1, 1 * loss, loss / 1, loss * 0.5, loss / 4, loss.mul(2), torch.div(loss, 2)]
    assert not sent
    assert [each.item() for each in scaled] == [-2.0, -2.0, -2.0, -1.0, -0.5, -4.0, -1.0]
    assert [(loss / 3).item(), (loss * -1).item(), (1 / loss).item()] == [pytest.approx(-2 / 3), 2.0, -0.5]
    assert len(sent) == 3


def sent_metrics() -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, which tokens were right, which count; what the device has of them is overwritten afterwards."""
    entropy, right, mask = torch.tensor([[0.5, 2.0, 0.0]]), torch.tensor([[True, False, False]]), torch.ones(1, 3)
    mask = mask > torch.tensor([[0, 0, 1]])
    metrics_ahead(entropy, right, mask)
    for each in (entropy, right, mask):
        overwrite(each, 0)
    return entropy, right, mask


def test_metrics_are_answered_as_a_trainer_asks_for_them() -> None:
    entropy, right, mask = sent_metrics()
    count, total, correct = mask.sum().sum(), entropy.detach().sum().sum(), right.sum().sum()
    assert count > 0
    assert not count > 2
    assert (total / count).item() == 1.25
    assert (correct / count).item() == 0.5
    assert right.tolist() == [[True, False, False]]
    assert torch.equal(total, torch.tensor(0.0)), "what the device has is still what is computed with"


def test_metrics_that_meet_what_nobody_sent_are_asked_of_the_device() -> None:
    entropy, _, mask = sent_metrics()
    assert (mask.sum() / torch.tensor(4)).item() == 0
    assert entropy.sum(dtype=torch.float64).item() == 0
    assert entropy.max().item() == 0
    assert type(entropy.max()) is Tensor


def test_metrics_that_were_changed_in_place_are_asked_of_the_device_or_sent_again() -> None:
    entropy, _, mask = sent_metrics()
    total = entropy.sum()
    entropy += 1
    mask.fill_(True)
    assert total.item() == 2.5
    assert entropy.sum().item() == 3
    assert (total / mask.sum()).item() == 0, "the device has no sum of entropies"
    metrics_ahead(mask)
    overwrite(mask, 0)
    assert mask.sum().item() == 3


def test_metrics_of_several_processes_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    entropy, _, _ = sent_metrics()
    assert type(entropy) is Tensor
    assert entropy.sum().item() == 0


def test_metrics_are_sent_anew_with_every_pass() -> None:
    """A buffer may be filled again without its version telling."""
    mask = torch.ones(4)
    for count in (4.0, 2.0):
        mask.data = torch.arange(4.0) < count
        metrics_ahead(mask)
        assert mask.sum().item() == count


def test_a_long_chain_of_metrics_ends_at_the_device() -> None:
    entropy, _, _ = sent_metrics()
    value = entropy.sum()
    for _ in range(2000):
        value = value * 0.999
    assert value.item() == 0


def test_a_metric_that_was_read_keeps_no_tokens() -> None:
    entropy = torch.ones(1, 64)
    metrics_ahead(entropy)
    assert isinstance(entropy, ReadAhead)
    assert entropy._sent is not None
    sent = weakref.ref(entropy._sent())
    total = entropy.sum() * 3
    assert total.item() == total.item() == 192
    del entropy
    assert sent() is None


class Other(Tensor):
    pass


def test_other_kinds_of_tensors_meet_a_plain_one() -> None:
    loss, leaf = loss_of([1.0, 3.0])
    entropy, _, _ = sent_metrics()
    two = torch.tensor(2.0).as_subclass(Other)
    for product, expected in ((loss * two, -4.0), (two * loss, -4.0), (entropy.sum() * two, 0.0)):
        assert type(product) is Other
        assert product.item() == expected
    (loss * two).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [-1.0, -1.0]


def test_others_may_compile_what_they_do_with_metrics() -> None:
    entropy, mask = torch.tensor([[0.5, 2.0, 0.0]]), torch.tensor([[True, True, False]])
    metrics_ahead(entropy, mask)

    def mean(values: Tensor, counted: Tensor) -> Tensor:
        return values.sum() / counted.sum()

    assert torch.compile(mean, fullgraph=True, backend="eager")(entropy, mask).item() == 1.25


def test_what_came_from_the_host_is_not_asked_of_the_device() -> None:
    labels = torch.tensor([[1, -100, 3]])
    there = labels.to("meta")
    came_from(labels, there)
    assert on_host(there) is labels
    assert there.to("meta") is there, "accelerate sends a batch again"
    assert (there != -100).sum().is_meta
    assert type(there[..., 1:]) is Tensor


def test_what_was_changed_since_is_not_remembered() -> None:
    labels = torch.tensor([1, 2])
    there = labels.clone()
    came_from(labels, there)
    there[0] = -100
    assert remembered(there) is None
    assert on_host(there).tolist() == [-100, 2]


def test_what_may_be_changed_unseen_is_not_remembered() -> None:
    labels = torch.tensor([1, 2])
    there = labels.clone()
    came_from(labels, there)
    there.data.copy_(torch.tensor([3, 4]))
    assert on_host(there).tolist() == [3, 4]


def test_metrics_are_not_taken_for_memories() -> None:
    """A mask that is filled again may look as it did when it was sent."""
    mask = torch.ones(3)
    metrics_ahead(mask)
    overwrite(mask, 0)
    assert on_host(mask).numpy().tolist() == [0, 0, 0]


def test_several_processes_remember_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    there = torch.tensor([1, 2])
    came_from(torch.tensor([3, 4]), there)
    assert on_host(there).tolist() == [1, 2]
