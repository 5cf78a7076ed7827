"""RoPE applied in place, in the output of the QKV matmul, where FlashAttention 4 would be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.engine.memory import checkpointing
from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.kernels.rotary import rope_forward
from pantheraml.models import flash
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import autograd_functions as functions
from pantheraml.specs.train import Checkpointing
from tests.unit.models.test_models_fast import LAYERS, pair, results


@pytest.fixture
def rope_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """`in_place` of each RoPE call. FlashAttention seems to be available."""
    calls: list[bool] = []

    def logged_rope(*args: Any, in_place: bool, **kwargs: Any) -> Any:
        calls.append(in_place)
        return rope_forward(*args, in_place=in_place, **kwargs)

    monkeypatch.setattr(functions, "rope_forward", logged_rope)
    monkeypatch.setattr(flash, "likely_supported", lambda *_: True)
    return calls


def on_document_attention(rope_calls: list[bool]) -> Any:
    model, _ = pair()
    use_document_attention(model)  # which runs the unfused model, too
    rope_calls.clear()
    return model


@pytest.mark.parametrize("mode", ["none", "selective", "full", "offload"])
def test_in_place_rope_is_bitwise_equal(
    mode: Checkpointing, rope_calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selective checkpointing stores the matmul's output, to which RoPE must not be applied twice."""
    monkeypatch.setattr(checkpointing, "MIN_INNER_DIM", 1)
    model = on_document_attention(rope_calls)
    apply_checkpointing(model, mode)
    actual = results(model)
    assert set(rope_calls) == {mode != "selective"}
    monkeypatch.setattr(flash, "likely_supported", lambda *_: False)
    expected = results(model)
    assert all(torch.equal(value, expected[name]) for name, value in actual.items())


def test_other_attention_does_not_use_in_place_rope(rope_calls: list[bool]) -> None:
    model, _ = pair()
    rope_calls.clear()  # of the comparison with the unfused layer
    results(model)
    assert rope_calls == [False] * LAYERS


def test_attention_dropout_does_not_use_in_place_rope(rope_calls: list[bool]) -> None:
    model = on_document_attention(rope_calls)
    for layer in model.get_base_model().model.layers:
        layer.self_attn.attention_dropout = 0.1
    results(model)
    assert rope_calls == [False] * LAYERS
