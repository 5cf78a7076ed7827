"""A loss with an early host copy behaves like any other, but reading it does not wait for its device."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from pantheraml.models.async_scalars import (
    HostMirroredTensor,
    host_values,
    known_host_copy,
    mirror_metrics_on_host,
    mirror_on_host,
    remember_host_copy,
    start_host_copy,
)


def loss_of(values: list[float]) -> tuple[Tensor, Tensor]:
    """A mean of token scores as trainers compute it, and its leaf."""
    leaf = torch.tensor(values, requires_grad=True)
    scores = mirror_on_host(leaf * 1.0)
    return -scores.sum() / torch.as_tensor(len(values)).clamp(min=1), leaf


def overwrite(tensor: Tensor, value: float) -> None:
    """Change the device value without bumping the version: reads from the device then return `value`."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data.fill_(value)


def test_reads_do_not_go_to_the_device() -> None:
    loss, _ = loss_of([1.0, 3.0])
    loss.backward()
    seen = loss.detach()
    overwrite(loss, float("nan"))
    for check in (torch.isnan, torch.isinf, Tensor.isnan):
        assert not check(seen)
    assert torch.isfinite(seen)
    assert seen.item() == float(seen) == seen.tolist() == -2.0
    assert f"{seen:.1f}" == "-2.0"
    assert (seen + 0).isnan(), "computation still uses the device value"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.5])
def test_finite_checks_are_correct(value: float) -> None:
    loss, _ = loss_of([value, 0.0])
    plain = torch.tensor([value, 0.0])
    plain = -plain.sum() / 2
    for check in (torch.isnan, torch.isinf, torch.isfinite):
        answer = check(loss.detach())
        assert bool(answer) == bool(check(plain))
        assert answer.dtype == torch.bool
        assert torch.equal(answer, check(plain))
        assert torch.equal(torch.where(answer, 1.0, 2.0), torch.where(check(plain), 1.0, 2.0))


def test_gradients_match_a_plain_loss() -> None:
    loss, leaf = loss_of([1.0, 3.0, 5.0])
    ((loss * 2 + 1) ** 2).backward()
    plain_leaf = torch.tensor([1.0, 3.0, 5.0], requires_grad=True)
    plain = -plain_leaf.sum() / 3
    ((plain * 2 + 1) ** 2).backward()
    assert leaf.grad is not None
    assert plain_leaf.grad is not None
    torch.testing.assert_close(leaf.grad, plain_leaf.grad, rtol=0, atol=0)


def test_derived_scalars_are_copied_too() -> None:
    loss, _ = loss_of([1.0, 3.0])
    for derived, expected in ((loss / 4, -0.5), (loss * 2, -4.0), (3 * loss, -6.0), (loss + loss, -4.0)):
        assert type(derived) is HostMirroredTensor
        overwrite(derived, 7.0)
        assert derived.item() == expected


@pytest.mark.parametrize("through", ["itself", "a detached tensor", "a view"])
def test_an_in_place_change_is_seen(through: str) -> None:
    loss, _ = loss_of([1.0, 3.0])
    seen = loss.detach()
    target = {"itself": seen, "a detached tensor": loss.detach(), "a view": seen.view(1)}[through]
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
    """For code that computes gradients in two parts."""
    loss, _ = loss_of([1.0, 3.0])
    leaf = loss.detach().requires_grad_()
    (leaf**2).backward()
    assert leaf.grad is not None
    assert leaf.grad.item() == -4.0


def test_running_sums_of_losses_are_plain_tensors() -> None:
    """A trainer's running sum is long-lived and never read in between."""
    loss, _ = loss_of([1.0, 3.0])
    total = torch.tensor(1.0)
    total += loss.detach()
    assert type(total) is Tensor
    assert total.item() == -1.0


def test_print_copy_and_save_as_a_plain_tensor() -> None:
    loss, _ = loss_of([1.0, 3.0])
    seen = loss.detach()
    assert repr(seen) == "tensor(-2.)"
    buffer = io.BytesIO()
    torch.save({"loss": seen}, buffer)
    buffer.seek(0)
    others: list[Any] = [copy.deepcopy(seen), pickle.loads(pickle.dumps(seen)), torch.load(buffer)["loss"]]
    for other in others:
        assert type(other) is Tensor
        assert other.item() == -2.0


def test_nothing_is_copied_without_a_gradient() -> None:
    assert type(mirror_on_host(torch.ones(3))) is Tensor
    with torch.inference_mode():
        loss, _ = loss_of([1.0, 3.0])
        assert type(loss) is Tensor
    loss, _ = loss_of([1.0, 3.0])
    with torch.inference_mode():
        assert not torch.isnan(loss)


def test_a_copy_is_a_snapshot() -> None:
    tensor = torch.ones(2)
    read = start_host_copy(tensor)
    tensor.zero_()
    assert read().tolist() == [1.0, 1.0]


def test_autograd_graph_has_no_extra_nodes() -> None:
    def names(tensor: Tensor) -> list[str]:
        node, actual = tensor.grad_fn, []
        while node is not None:
            actual.append(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        return actual

    x = torch.randn(4, requires_grad=True)
    assert names(-mirror_on_host(x * 2).sum() / 3) == names(-(x * 2).sum() / 3)


def test_existing_tensors_keep_their_type() -> None:
    loss = mirror_on_host(torch.ones(2, requires_grad=True).sum())
    parameter, leaf = torch.nn.Parameter(torch.zeros(())), torch.zeros((), requires_grad=True)
    with torch.no_grad():
        assert parameter.copy_(loss) is parameter
        leaf.copy_(loss)
    assert leaf.to(loss) is leaf
    assert leaf.type_as(loss) is leaf
    base = torch.ones(3, requires_grad=True) * 2
    assert mirror_on_host(base[1])._base is base
    assert [type(each) for each in (parameter, leaf, base)] == [torch.nn.Parameter, Tensor, Tensor]
    leaf.data.fill_(9)
    assert (parameter.item(), leaf.item()) == (2, 9)


def test_nothing_is_copied_with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives change a loss in place without bumping its version."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loss, _ = loss_of([1.0, 3.0])
    assert type(loss) is Tensor
    overwrite(loss, 6.0)
    assert loss.detach().item() == 6.0


def test_scaling_by_a_power_of_two_needs_no_new_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = loss_of([1.0, 3.0])
    sent: list[Tensor] = []
    monkeypatch.setattr(
        "pantheraml.models.async_scalars.start_host_copy", lambda tensor: sent.append(tensor) or start_host_copy(tensor)
    )
    scaled = [loss * 1, 1 * loss, loss / 1, loss * 0.5, loss / 4, loss.mul(2), torch.div(loss, 2)]
    assert not sent
    assert [each.item() for each in scaled] == [-2.0, -2.0, -2.0, -1.0, -0.5, -4.0, -1.0]
    assert [(loss / 3).item(), (loss * -1).item(), (1 / loss).item()] == [pytest.approx(-2 / 3), 2.0, -0.5]
    assert len(sent) == 3


def mirrored_metrics() -> tuple[Tensor, Tensor, Tensor]:
    """Entropies, correct tokens and mask; their device values are overwritten afterwards."""
    entropy, right, mask = torch.tensor([[0.5, 2.0, 0.0]]), torch.tensor([[True, False, False]]), torch.ones(1, 3)
    mask = mask > torch.tensor([[0, 0, 1]])
    mirror_metrics_on_host(entropy, right, mask)
    for each in (entropy, right, mask):
        overwrite(each, 0)
    return entropy, right, mask


def test_derived_metrics_are_read_from_the_host() -> None:
    entropy, right, mask = mirrored_metrics()
    count, total, correct = mask.sum().sum(), entropy.detach().sum().sum(), right.sum().sum()
    assert count > 0
    assert not count > 2
    assert (total / count).item() == 1.25
    assert (correct / count).item() == 0.5
    assert right.tolist() == [[True, False, False]]
    assert torch.equal(total, torch.tensor(0.0)), "computation still uses the device value"


def test_metrics_combined_with_uncopied_tensors_are_read_from_the_device() -> None:
    entropy, _, mask = mirrored_metrics()
    assert (mask.sum() / torch.tensor(4)).item() == 0
    assert entropy.sum(dtype=torch.float64).item() == 0
    assert entropy.max().item() == 0
    assert type(entropy.max()) is Tensor


def test_metrics_changed_in_place_are_read_from_the_device_or_copied_again() -> None:
    entropy, _, mask = mirrored_metrics()
    total = entropy.sum()
    entropy += 1
    mask.fill_(True)
    assert total.item() == 2.5
    assert entropy.sum().item() == 3
    assert (total / mask.sum()).item() == 0, "the device has no sum of entropies"
    mirror_metrics_on_host(mask)
    overwrite(mask, 0)
    assert mask.sum().item() == 3


def test_metrics_are_not_copied_with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    entropy, _, _ = mirrored_metrics()
    assert type(entropy) is Tensor
    assert entropy.sum().item() == 0


def test_metrics_are_copied_again_in_every_forward() -> None:
    """A buffer may be refilled without a new version."""
    mask = torch.ones(4)
    for count in (4.0, 2.0):
        mask.data = torch.arange(4.0) < count
        mirror_metrics_on_host(mask)
        assert mask.sum().item() == count


def test_a_long_chain_of_metrics_is_read_from_the_device() -> None:
    entropy, _, _ = mirrored_metrics()
    value = entropy.sum()
    for _ in range(2000):
        value = value * 0.999
    assert value.item() == 0


def test_a_read_metric_releases_its_inputs() -> None:
    entropy = torch.ones(1, 64)
    mirror_metrics_on_host(entropy)
    assert isinstance(entropy, HostMirroredTensor)
    assert entropy._read_copy is not None
    sent = weakref.ref(entropy._read_copy())
    total = entropy.sum() * 3
    assert total.item() == total.item() == 192
    del entropy
    assert sent() is None


class Other(Tensor):
    pass


def test_other_tensor_subclasses_see_a_plain_tensor() -> None:
    loss, leaf = loss_of([1.0, 3.0])
    entropy, _, _ = mirrored_metrics()
    two = torch.tensor(2.0).as_subclass(Other)
    for product, expected in ((loss * two, -4.0), (two * loss, -4.0), (entropy.sum() * two, 0.0)):
        assert type(product) is Other
        assert product.item() == expected
    (loss * two).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [-1.0, -1.0]


def test_metrics_can_be_used_in_compiled_code() -> None:
    entropy, mask = torch.tensor([[0.5, 2.0, 0.0]]), torch.tensor([[True, True, False]])
    mirror_metrics_on_host(entropy, mask)

    def mean(values: Tensor, counted: Tensor) -> Tensor:
        return values.sum() / counted.sum()

    assert torch.compile(mean, fullgraph=True, backend="eager")(entropy, mask).item() == 1.25


def test_a_tensor_from_the_host_is_not_read_from_the_device() -> None:
    labels = torch.tensor([[1, -100, 3]])
    there = labels.to("meta")
    remember_host_copy(labels, there)
    assert host_values(there) is labels
    assert there.to("meta") is there, "accelerate moves a batch again"
    assert (there != -100).sum().is_meta
    assert type(there[..., 1:]) is Tensor


def test_the_host_copy_is_dropped_after_an_in_place_change() -> None:
    labels = torch.tensor([1, 2])
    there = labels.clone()
    remember_host_copy(labels, there)
    there[0] = -100
    assert known_host_copy(there) is None
    assert host_values(there).tolist() == [-100, 2]


def test_the_host_copy_is_dropped_after_access_to_data() -> None:
    labels = torch.tensor([1, 2])
    there = labels.clone()
    remember_host_copy(labels, there)
    there.data.copy_(torch.tensor([3, 4]))
    assert host_values(there).tolist() == [3, 4]


def test_metric_copies_are_not_used_as_host_values() -> None:
    """A refilled mask may have the version it had when it was copied."""
    mask = torch.ones(3)
    mirror_metrics_on_host(mask)
    overwrite(mask, 0)
    assert host_values(mask).numpy().tolist() == [0, 0, 0]


def test_host_copies_are_not_kept_with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    there = torch.tensor([1, 2])
    remember_host_copy(torch.tensor([3, 4]), there)
    assert host_values(there).tolist() == [1, 2]
