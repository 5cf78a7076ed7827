"""Queries and keys that turn in the output of their product, where FlashAttention 4 would attend to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.engine import checkpointing
from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.kernels.rotary import rotate
from pantheraml.models import flash
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import functions
from pantheraml.specs.train import Checkpointing
from tests.unit.models.test_models_fast import LAYERS, pair, results


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether in place, of each rotation. The kernels seem to be there."""
    noted: list[bool] = []

    def note(*args: Any, in_place: bool, **named: Any) -> Any:
        noted.append(in_place)
        return rotate(*args, in_place=in_place, **named)

    monkeypatch.setattr(functions, "rotate", note)
    monkeypatch.setattr(flash, "is_likely", lambda *_: True)
    return noted


def on_document_attention(turned: list[bool]) -> Any:
    model, _ = pair()
    use_document_attention(model)  # which tries the model as it was, too
    turned.clear()
    return model


@pytest.mark.parametrize("mode", ["none", "selective", "full", "offload"])
def test_the_numbers_stay(mode: Checkpointing, turned: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Selective checkpointing keeps what a product gave: that is not to be turned twice."""
    monkeypatch.setattr(checkpointing, "SMALLEST_INNER", 1)
    model = on_document_attention(turned)
    apply_checkpointing(model, mode)
    found = results(model)
    assert set(turned) == {mode != "selective"}
    monkeypatch.setattr(flash, "is_likely", lambda *_: False)
    expected = results(model)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_another_attention_gets_tensors_of_its_own(turned: list[bool]) -> None:
    model, _ = pair()
    results(model)
    assert turned == [False] * LAYERS


def test_attention_with_dropout_gets_tensors_of_its_own(turned: list[bool]) -> None:
    model = on_document_attention(turned)
    for layer in model.get_base_model().model.layers:
        layer.self_attn.attention_dropout = 0.1
    results(model)
    assert turned == [False] * LAYERS
