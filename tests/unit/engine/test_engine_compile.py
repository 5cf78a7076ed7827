"""Layers compiled under a third-party trainer: for recurring shapes, with unchanged results."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.engine.compile import MOST_SHAPES, PASSES_BEFORE, compile_steady_shapes
from pantheraml.models.attention import use_document_attention

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # raised by torch itself


@pytest.fixture(autouse=True)
def _without_a_code_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    assert use_document_attention(model) is None
    return model


def train(model: Any, width: int, **inputs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    ids = torch.arange(2 * width).view(2, width) % 64
    loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def is_compiled(model: Any) -> bool:
    """Whether the last pass ran compiled."""
    (found,) = {layer._compiled_call_impl is not None for layer in model.model.layers}
    return found


def test_recurring_shape_is_compiled_with_equal_results() -> None:
    ours, theirs = llama(), llama()
    assert compile_steady_shapes(ours) == 2
    for turn in range(PASSES_BEFORE + 2):
        found, wanted = train(ours, 8), train(theirs, 8)
        assert is_compiled(ours) == (turn >= PASSES_BEFORE)
        assert all(map(torch.equal, found, wanted))


def test_other_passes_run_eagerly() -> None:
    ours, theirs = llama(), llama()
    compile_steady_shapes(ours)
    for _ in range(PASSES_BEFORE + 1):
        train(ours, 8)
    assert is_compiled(ours)
    assert all(map(torch.equal, train(ours, 10), train(theirs, 10)))
    assert not is_compiled(ours), "another shape"
    padded = torch.ones(2, 8, dtype=torch.long)
    padded[0, 5:] = 0
    assert all(map(torch.equal, train(ours, 8, attention_mask=padded), train(theirs, 8, attention_mask=padded)))
    assert not is_compiled(ours), "several documents in a row"
    with torch.no_grad():
        ours(input_ids=torch.zeros(2, 8, dtype=torch.long))
    assert not is_compiled(ours)
    train(ours, 8)
    assert is_compiled(ours)


def test_number_of_compiled_shapes_is_bounded() -> None:
    model = llama()
    compile_steady_shapes(model)
    for width in range(8, 8 + MOST_SHAPES + 1):
        for _ in range(PASSES_BEFORE + 1):
            train(model, width)
    assert not is_compiled(model)
    train(model, 8)
    assert is_compiled(model)


def test_deepcopied_model_compiles_its_own_layers() -> None:
    model = llama()
    compile_steady_shapes(model)
    for _ in range(PASSES_BEFORE + 1):
        train(model, 8)
    twin = copy.deepcopy(model)
    train(twin, 8)
    assert not is_compiled(twin)
    assert is_compiled(model)


def test_checkpointed_layers_run_eagerly() -> None:
    model = llama()
    compile_steady_shapes(model)
    model.gradient_checkpointing_enable()
    for _ in range(PASSES_BEFORE + 2):
        train(model, 8)
    assert not is_compiled(model)


def test_compiler_failure_warns_once_and_falls_back_to_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise NotImplementedError("no such thing")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend=fail))
    ours, theirs = llama(), llama()
    compile_steady_shapes(ours)
    for _ in range(PASSES_BEFORE + 3):
        assert all(map(torch.equal, train(ours, 8), train(theirs, 8)))
    assert caplog.text.count("decoder layers are not compiled") == 1


def test_layers_compiled_by_the_user_are_left_alone() -> None:
    model = llama()
    compile_steady_shapes(model)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    theirs = [layer._compiled_call_impl for layer in model.model.layers]
    for _ in range(PASSES_BEFORE + 2):
        train(model, 8)
    assert [layer._compiled_call_impl for layer in model.model.layers] == theirs
