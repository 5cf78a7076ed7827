"""The norms' gradients from the rows that a fused layer keeps in fp8 anyway: how near they are, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.kernels.rms_norm import Normed, Quantised, rms_norm, rms_norm_backward, rms_norm_backward_rows
from pantheraml.models.fast import functions, fuse
from pantheraml.models.quantise.fp8 import FP8Linear
from tests.unit.models.test_models_fast import LAYERS, adapted, apart, base_model, fused, packed, results, together

IDS = torch.randint(4, 256, (8, 64), generator=torch.Generator().manual_seed(0))
WIDTH = 128

Change = Callable[[Tensor, Tensor], Quantised]


def layers(family: str, *, fp8: bool = True) -> nn.Module:
    base = base_model(family, initializer_range=0.05, hidden_size=WIDTH)
    model = adapted(packed(base) if fp8 else base, size=0.05)
    assert fuse(model).fused == LAYERS
    return model


def from_plain_rows(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(functions, "_plain_rows", lambda normed, _: normed.total)
        return results(model, input_ids=IDS, labels=IDS)


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_adapters_gradients_are_near_those_from_plain_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In direction and length. The largest distances measured are a cosine of 0.998 and a length of 0.992; noise of a
    thousandth in the gradients before the norms gives as much, because later products quantise theirs anew."""
    model = layers(family)
    exact = from_plain_rows(model, monkeypatch)
    ours = results(model, input_ids=IDS, labels=IDS)
    assert torch.equal(ours["logits"], exact["logits"])
    for name, wanted in exact.items():
        cosine = torch.cosine_similarity(ours[name].flatten(), wanted.flatten(), dim=0)
        assert cosine > 0.997, f"{name}: {cosine}"
        assert 0.985 < ours[name].norm() / wanted.norm() < 1.015, name


def distances(model: nn.Module, change: Change, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far each norm's gradient, from fp8 rows and changed, is from that from plain rows, for one incoming gradient.
    The residual gradient, which is the same, does not count."""
    found: list[float] = []

    def compare(g: Tensor, x: Any, weight: Tensor, inverse: Tensor, plus_one: bool) -> Tensor:
        plain, quantised = (rms_norm_backward(g, rows, weight, inverse, plus_one=plus_one) for rows in x)
        found.append(apart(quantised, plain))
        return x[0]

    def backward(g: Tensor, x: Any, weight: Tensor, inverse: Tensor, *, plus_one: bool, **options: Any) -> Tensor:
        if not isinstance(x, Tensor):  # as that of the last norm is
            x = compare(g, x, weight, inverse, plus_one)
        return rms_norm_backward(g, x, weight, inverse, plus_one=plus_one, **options)

    def backward_rows(g: Tensor, x: Any, weight: Tensor, inverse: Tensor, *, plus_one: bool, **options: Any) -> Any:
        x = compare(g, x, weight, inverse, plus_one)
        return rms_norm_backward_rows(g, x, weight, inverse, plus_one=plus_one, **options)

    with monkeypatch.context() as patch:
        patch.setattr(functions, "_plain_rows", lambda normed, _: normed.total)
        patch.setattr(functions, "_norm_rows", lambda plain, *rows: (plain, change(*rows)))
        patch.setattr(functions, "rms_norm_backward", backward)
        patch.setattr(functions, "rms_norm_backward_rows", backward_rows)
        results(model, input_ids=IDS, labels=IDS)
    return found


WRONG: dict[str, Change] = {
    "scales of other rows": lambda payload, scales: Quantised(payload, scales.roll(1)),
    "scales too large by half": lambda payload, scales: Quantised(payload, 1.5 * scales),
    "rows of other tokens": lambda payload, scales: Quantised(payload.roll(1, dims=0), scales),
}


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_a_norms_gradient_is_near_that_from_plain_rows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest distance measured is 0.5%. The first norm of all has none to give: nobody asks for it."""
    model = layers(family)
    found = distances(model, Quantised, monkeypatch)
    assert len(found) == 2 * LAYERS - 1
    assert max(found) < 0.01
    for change in WRONG.values():
        assert min(distances(model, change, monkeypatch)) > 0.02


@pytest.mark.parametrize(
    "names",
    [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",), ("o_proj",)],
    ids=lambda names: names[0],
)
def test_layers_of_which_some_products_are_in_fp8(names: tuple[str, ...]) -> None:
    """Bounds are those of layers whose products all are."""
    base = base_model("llama", initializer_range=0.05)
    for name, module in list(base.named_modules()):
        parent, _, own = name.rpartition(".")
        if own in names:
            setattr(base.get_submodule(parent), own, FP8Linear(module.weight.detach(), None))
    plain = adapted(base, size=0.05)
    ours, theirs = results(fused(plain)), results(plain)
    assert apart(ours["logits"], theirs["logits"]) < 0.05
    assert together(ours, theirs) > 0.9965


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_what_was_normalised_is_kept_only_where_no_product_is_in_fp8(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers("llama", fp8=fp8)
    normalised: list[Tensor] = []
    saved: list[Tensor] = []

    def watched(*args: Any, **options: Any) -> Normed:
        normed = rms_norm(*args, **options)
        normalised.append(normed.total)
        return normed

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    monkeypatch.setattr(functions, "rms_norm", watched)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    places = [tensor.untyped_storage().data_ptr() for tensor in saved]
    *in_layers, last = (total.untyped_storage().data_ptr() in places for total in normalised)
    assert in_layers == [not fp8] * (2 * LAYERS)
    assert last
    loss.backward()
