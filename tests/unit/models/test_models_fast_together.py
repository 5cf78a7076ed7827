"""All fused layers in one go: the same bits as one by one, and only where that is the same."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.models.fast import functions, fuse, layers
from pantheraml.models.fast.groups import ProjectionGroup
from pantheraml.models.fast.trained import TrainedGroup
from pantheraml.models.quantise.trained_fp8 import use_fp8_products
from tests.unit.models.test_models_fast import FUSED, IDS, LAYERS, adapted, base_model, packed, results


def in_fp8(family: str) -> Any:
    return adapted(packed(base_model(family)), size=0.05)


def trained(family: str) -> Any:
    model = base_model(family)
    use_fp8_products(model)
    return model.train()


MODELS: dict[str, Callable[[str], Any]] = {"lora": lambda f: adapted(base_model(f)), "fp8": in_fp8, "full": trained}


class Runs:
    """How many layers each call ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        real = layers._run_layers

        def run(some: Any, *args: Any) -> Tensor:
            self.lengths.append(len(some))
            return real(some, *args)

        monkeypatch.setattr(layers, "_run_layers", run)

    def take(self) -> list[int]:
        taken, self.lengths = self.lengths, []
        return taken


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def fused(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    assert fuse(twin).fused == LAYERS
    return twin


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert torch.equal(ours[name], wanted), name


ONE_BY_ONE, TOGETHER = [1] * LAYERS, [LAYERS]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("family", FUSED)
def test_the_same_bits(family: str, kind: str, runs: Runs) -> None:
    if (family, kind) == ("qwen2", "full"):
        pytest.skip("its biases are trained")
    model = fused(MODELS[kind](family))
    first = results(model)
    assert runs.take() == ONE_BY_ONE
    second = results(model)
    # of this Qwen2 some layers look at a window, and get another mask
    assert runs.take() == (ONE_BY_ONE if family == "qwen2" else TOGETHER)
    assert_equal(second, first)


def test_no_row_is_rounded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the last layer's, which no norm comes after."""
    asked: list[Any] = []
    for kind in (ProjectionGroup, TrainedGroup):
        real = kind.gradient_operand
        monkeypatch.setattr(kind, "gradient_operand", lambda self, g, real=real: asked.append(self) or real(self, g))
    for make in (in_fp8, trained):
        model = fused(make("llama"))
        results(model)
        assert len(asked) == LAYERS
        asked.clear()
        results(model)
        assert len(asked) == 1
        asked.clear()


def test_rows_are_not_those_of_another_gradient() -> None:
    model: Any = fused(in_fp8("llama"))
    group = next(m for m in model.modules() if hasattr(m, "fused_parts")).fused_parts.groups[-1]
    link = functions.Link(group)
    gradient = torch.randn(5, group.height)
    rows = group.gradient_operand(gradient)
    link.give(gradient, rows)
    assert link.take(gradient) is rows
    assert link.take(gradient) is not rows
    link.give(gradient, rows)
    assert link.take(gradient.clone()) is not rows
    link.give(gradient, rows)
    gradient *= 2
    assert torch.equal(link.take(gradient).scales, 2 * rows.scales)


def test_nothing_is_kept_of_a_pass() -> None:
    """No cycle: what a pass leaves is gone with its result."""
    model = fused(in_fp8("llama"))
    results(model)
    gc.collect()
    gc.disable()
    try:
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        nodes, pending = set(), [out.loss.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in nodes:
                continue
            nodes.add(node)
            pending += [following for following, _ in node.next_functions]
        found = [node for node in nodes if "AfterAttention" in type(node).__name__]
        assert len(found) == LAYERS
        seen = [weakref.ref(node.link) for node in found if node.link is not None]
        assert len(seen) == LAYERS - 1
        del out, nodes, found, node, pending
        assert all(link() is None for link in seen)
    finally:
        gc.enable()


def test_one_by_one_where_somebody_looks(runs: Runs) -> None:
    model: Any = fused(in_fp8("llama"))
    results(model)
    results(model)
    runs.take()
    seen: list[Tensor] = []
    inner = [m for m in model.modules() if hasattr(m, "fused_parts")]
    handle = inner[1].register_forward_hook(lambda _m, args, out: seen.append(out))
    results(model)
    assert runs.take() == ONE_BY_ONE
    assert len(seen) == 1
    handle.remove()
    results(model)
    assert runs.take() == TOGETHER
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert runs.take() == ONE_BY_ONE
    with model.disable_adapter():
        model(input_ids=IDS, use_cache=False)
    assert runs.take() == []
    results(model)
    assert runs.take() == TOGETHER


def test_checkpointed_layers_run_one_by_one(runs: Runs) -> None:
    model = fused(in_fp8("llama"))
    wanted = results(model)
    results(model)
    runs.take()
    apply_checkpointing(model, "full")
    assert_equal(results(model), wanted)
    assert set(runs.take()) == {1}


def test_layers_that_get_different_arguments(runs: Runs) -> None:
    """As where some look at a window, and others at everything."""
    model: Any = fused(adapted(base_model("llama")))
    inner = [m for m in model.modules() if hasattr(m, "fused_parts")]
    real = type(inner[1]).forward

    class Other(type(inner[1])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out: Tensor = real(self, hidden_states, *args, **{**kwargs, "attention_mask": object()})
            return out

    inner[1].__class__ = Other
    for _ in range(3):
        with pytest.raises((TypeError, AttributeError)):
            results(model)
    assert TOGETHER[0] not in runs.take()


def test_a_layer_left_out_is_noticed(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = fused(adapted(base_model("llama")))
    results(model)
    body = model.get_base_model().model
    kept, body.layers = body.layers, body.layers[:1]
    results_of_one = model(input_ids=IDS, use_cache=False)
    assert runs.take() == [*ONE_BY_ONE, LAYERS]
    body.layers = kept
    results(model)
    assert "left out" in caplog.text
    assert runs.take() == ONE_BY_ONE
    del results_of_one
