"""A fused layer of each kind is compared with the layer that it replaces, before any is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3DecoderLayer
from transformers.models.granite.modeling_granite import GraniteDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from pantheraml.models.fast import families, fuse, is_fused, self_check
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from tests.unit.models.fused_families import FUSED
from tests.unit.models.test_models_fast import EXACT, LAYERS, adapted, assert_same, base_model, quantize_to_fp8, results


def distances(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Fuse the model, and return the outcome of each comparison."""
    outcomes: list[str | None] = []
    real = self_check.why_not_equal

    def logged(*args: Any, **options: Any) -> str | None:
        outcomes.append(real(*args, **options))
        return outcomes[-1]

    monkeypatch.setattr("pantheraml.models.fast.layers.why_not_equal", logged)
    report = fuse(model)
    assert (report.fused, bool(report.reasons)) == ((0, True) if any(outcomes) else (LAYERS, False))
    return outcomes


@pytest.mark.parametrize("family", FUSED)
def test_one_layer_of_each_kind_is_compared(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = 2 if family in ("qwen2", "gemma3_text", "smollm3", "ministral", "olmo3", "exaone4", "cwm") else 1
    assert distances(adapted(base_model(family)), monkeypatch) == [None] * kinds


@pytest.mark.parametrize("make", [quantize_to_fp8, lambda base: base.to(torch.bfloat16)], ids=["fp8", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_rounding_is_no_difference(family: str, make: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(distances(adapted(make(base_model(family, initializer_range=0.05))), monkeypatch))


def test_trainable_layers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base_model("qwen3").train()
    use_fp8_matmuls(model)
    assert distances(model, monkeypatch) == [None]


def test_comparing_changes_nothing() -> None:
    compared = adapted(base_model("qwen3"))
    other = copy.deepcopy(compared)
    state = torch.get_rng_state()
    fuse(compared)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in compared.modules())
    assert all(parameter.grad is None for parameter in compared.parameters())
    fuse(other, compare=False)
    assert_same(results(compared), results(other), tolerance=0)


def residual_times(factor: float) -> Callable[..., Any]:
    def change(real: Any, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x + factor * (real(layer, x, *args, **kwargs) - x)

    return change


def without_norms(real: Any, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    own = layer.self_attn.q_norm, layer.self_attn.k_norm
    layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    try:
        return real(layer, x, *args, **kwargs)
    finally:
        layer.self_attn.q_norm, layer.self_attn.k_norm = own


def with_relu(real: Any, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    own, layer.mlp.act_fn = layer.mlp.act_fn, nn.ReLU()
    try:
        return real(layer, x, *args, **kwargs)
    finally:
        layer.mlp.act_fn = own


def other_arguments(real: Any, layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise TypeError("forward() needs another argument\nand more")


def told_attention(**told: Any) -> Callable[..., Any]:
    """Attention gets these arguments instead of the class's own."""

    def change(real: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        config, own = layer.self_attn.config, layer.self_attn.config._attn_implementation
        real_attention = ALL_ATTENTION_FUNCTIONS[own]
        config._attn_implementation = "told"
        ALL_ATTENTION_FUNCTIONS["told"] = lambda *inputs, **given: real_attention(*inputs, **{**given, **told})
        try:
            return real(layer, *args, **kwargs)
        finally:
            config._attn_implementation = own
            del ALL_ATTENTION_FUNCTIONS["told"]

    return change


CHANGES: dict[str, tuple[str, type[nn.Module], Callable[..., Any], str]] = {
    "multiplier": ("llama", LlamaDecoderLayer, residual_times(0.5), "its output differs by"),
    "another multiplier": ("granite", GraniteDecoderLayer, residual_times(2.0), "its output differs by"),
    "no head norms": ("qwen3", Qwen3DecoderLayer, without_norms, "its output differs by"),
    "activation": ("gemma3_text", Gemma3DecoderLayer, with_relu, "its output differs by"),
    "window": (
        "qwen3", Qwen3DecoderLayer, told_attention(sliding_window=8192),
        "Qwen3DecoderLayer calls attention with sliding_window=8192 and not None",
    ),
    "dropout": ("llama", LlamaDecoderLayer, told_attention(dropout=0.2), "attention with dropout=0.2 and not 0.0"),
    "new argument": (
        "gemma3_text", Gemma3DecoderLayer, told_attention(sinks=torch.ones(4)), "attention with sinks=a Tensor and not"
    ),
    "arguments": ("llama", LlamaDecoderLayer, other_arguments, "failed: TypeError: forward() needs another argument"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_layers_of_a_changed_class_run_unfused(
    name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if a release of transformers had changed it."""
    family, kind, change, reason = CHANGES[name]
    model = adapted(quantize_to_fp8(base_model(family)) if fp8 else base_model(family))
    real: Any = kind.forward
    monkeypatch.setattr(kind, "forward", lambda layer, x, *args, **kwargs: change(real, layer, x, *args, **kwargs))
    torch.manual_seed(0)  # for dropout
    expected = None if name == "arguments" else results(copy.deepcopy(model))
    with caplog.at_level("INFO", logger="pantheraml"):
        report = fuse(model)
    assert report.fused == 0
    assert not any(map(is_fused, model.modules()))
    text = next(iter(report.reasons))
    assert reason in text
    assert text in caplog.text
    if expected is not None:
        torch.manual_seed(0)
        assert_same(results(model), expected, tolerance=1e-3 if fp8 else EXACT)


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gemma", {"plus_one": False}),
        ("granite", {"multiplier": None}),
        ("ministral3", {"scales_queries": False}),
        ("gemma3_text", {"output_norms": ()}),
        ("gemma3_text", {"mlp_norm": "post_attention_layernorm"}),
    ],
)
def test_wrong_entries_of_the_table_are_found(
    family: str, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(base_model(family))
    kind = type(model.get_base_model().model.layers[0])
    name = f"{kind.__module__}.{kind.__qualname__}"
    monkeypatch.setitem(families.FAMILIES, name, replace(families.FAMILIES[name], **wrong))
    report = fuse(model)
    assert report.fused == 0
    assert all("differs by" in reason for reason in report.reasons)


def test_only_the_changed_kind_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's layers with a sliding window, but not the others."""
    real = Gemma3Attention.forward

    def windowed_differ(attention: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = real(attention, *args, **kwargs)
        return (-out if attention.sliding_window else out), weights

    plain = adapted(base_model("gemma3_text"))
    monkeypatch.setattr(Gemma3Attention, "forward", windowed_differ)
    model = copy.deepcopy(plain)
    report = fuse(model)
    assert report.fused == 1
    assert sum(report.reasons.values()) == 1
    assert [is_fused(layer) for layer in model.get_base_model().model.layers] == [False, True]
    assert_same(results(model), results(plain))


def test_a_weight_that_is_nan_is_left_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_model("llama")
    base.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
    assert distances(adapted(base), monkeypatch) == [None]


def test_a_fused_layer_that_computes_nan_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pantheraml.models.fast.layers.Branch.forward", lambda _, delta: (delta * torch.nan, None))
    (reason,) = distances(adapted(base_model("llama")), monkeypatch)
    assert reason is not None
    assert "differs by nan" in reason
