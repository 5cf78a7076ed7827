"""Fused layers read the weights that the base has now, wherever a script has put them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.models.test_models_fast import adapted, assert_same, base_model, fused, logits, results, runs_fused

FACTOR = 1.25


def weights(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if ".base_layer." in name}


def in_a_copy(model: Any) -> Any:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in weights(twin).values():
            weight.mul_(FACTOR)
    return twin


def as_data(model: Any) -> Any:
    for weight in weights(model).values():
        weight.data = FACTOR * weight.data
    return model


def by_state_dict(model: Any) -> Any:
    names = weights(model)
    model.load_state_dict({n: FACTOR * w if n in names else w for n, w in model.state_dict().items()}, assign=True)
    return model.requires_grad_(False)


def and_train_adapters(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


@pytest.mark.parametrize("replace", [in_a_copy, as_data, by_state_dict])
def test_replaced_weights_are_read(replace: Callable[[Any], Any]) -> None:
    plain = adapted(base_model("qwen2"))  # with biases
    ours = fused(plain)
    before = results(ours)["logits"]
    ours, theirs = (and_train_adapters(replace(model)) for model in (ours, plain))
    actual = results(ours)
    assert_same(actual, results(theirs))
    assert not torch.allclose(actual["logits"], before)
    assert runs_fused(ours)
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(logits(ours), logits(theirs))


def test_a_copy_shares_nothing() -> None:
    ours = fused(adapted(base_model("llama")))
    before = results(ours)
    assert_same(results(copy.deepcopy(ours)), before)
    in_a_copy(ours)
    assert_same(results(ours), before, 0.0)


def test_weights_in_another_dtype_are_read(caplog: pytest.LogCaptureFixture) -> None:
    plain = adapted(base_model("llama"))
    ours = fused(plain)
    for model in (ours, plain):
        model.double()
        as_data(model)
    with caplog.at_level(logging.WARNING, logger="pantheraml"):
        assert_same(results(ours), results(plain))
    assert "run unfused: a weight of the base has another dtype" in caplog.text
    with ours.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(logits(ours), logits(plain))
    for model in (ours, plain):
        model.float()
    assert runs_fused(ours)
    assert_same(results(ours), results(plain))


def test_a_replaced_weight_that_trains_stays_where_it_is() -> None:
    plain = adapted(base_model("llama"))
    ours = fused(plain)
    for model in (ours, plain):
        as_data(model)
        for weight in weights(model).values():
            weight.requires_grad_()
    places = [weight.data_ptr() for weight in weights(ours).values()]
    assert_same(results(ours), results(plain))
    assert not runs_fused(ours)
    assert [weight.data_ptr() for weight in weights(ours).values()] == places
    for model in (ours, plain):
        model.requires_grad_(False)
    assert runs_fused(ours)
    torch.testing.assert_close(logits(ours), logits(plain))
