"""Layers compiled under a third-party trainer: for recurring shapes, with unchanged results."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.api.speed_up import _can_compile
from pantheraml.engine.compile import MOST_SHAPES, PASSES_BEFORE, compile_steady_shapes
from pantheraml.kernels import dispatch
from pantheraml.models.adapters import apply_method, trainable_parameters
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast.norms import fuse_norms
from pantheraml.models.quantize.quantized_linear import quantize_linears
from pantheraml.specs.train import MethodConfig

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


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_adapters_of_layers_that_are_not_fused_are_compiled_with_equal_results(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms in one kernel, which compiled layers leave to the compiler; and switched off in between."""
    monkeypatch.setattr(dispatch, "_interpreted", lambda: False)  # it cannot be traced, and on a GPU it is not called
    base = llama()
    if fp8:
        quantize_linears(base, "fp8", dtype=torch.float32, device=torch.device("cpu"))
    theirs: Any = apply_method(base, MethodConfig(rank=4), seed=0).train()
    for _, parameter in trainable_parameters(theirs):
        parameter.data.add_(0.05)
    ours = copy.deepcopy(theirs)
    inner = ours.get_base_model()
    assert fuse_norms(inner.modules()) == 5
    assert compile_steady_shapes(inner) == 2
    assert _can_compile(ours)
    ids = torch.arange(16).view(2, 8)
    for turn in range(PASSES_BEFORE + 2):
        results = []
        for model in (ours, theirs):
            model.zero_grad()
            with torch.no_grad(), model.disable_adapter():
                reference = model(input_ids=ids, use_cache=False).logits
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            gradients = [parameter.grad.clone() for _, parameter in trainable_parameters(model)]
            results.append([reference, loss.detach(), *gradients])
        assert is_compiled(inner) == (turn >= PASSES_BEFORE)
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-2 if fp8 else 1e-4, atol=1e-5)


def test_what_was_not_measured_is_not_compiled() -> None:
    for method in (MethodConfig(rank=4, dropout=0.1), MethodConfig(rank=4, kind="dora")):
        assert not _can_compile(apply_method(llama(), method, seed=0))
    base = llama()
    quantize_linears(base, "nf4", dtype=torch.float32, device=torch.device("cpu"))
    assert not _can_compile(apply_method(base, MethodConfig(rank=4), seed=0))
