"""All fused layers in one go: the same bits as one by one, and only where that is the same."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import functions, fuse, layers, run_together
from pantheraml.models.fast.groups import ProjectionGroup
from pantheraml.models.fast.trained import TrainedGroup
from pantheraml.models.quantise.trained_fp8 import use_fp8_products
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here
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
    assert use_document_attention(twin) is None
    assert fuse(twin).fused == LAYERS
    run_together(twin)
    return twin


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "fused_parts")]


def body_of(model: Any) -> Any:
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model


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
    assert runs.take() == TOGETHER
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


def test_layers_with_masks_of_their_own(runs: Runs) -> None:
    """Short passes have none, so that all layers are given the same."""
    model: Any = copy.deepcopy(adapted(base_model("qwen2")))
    assert fuse(model).fused == LAYERS
    run_together(model)  # attention stays torch's, with masks
    for ids in (IDS[:, :3], IDS, IDS):
        results(model, input_ids=ids, labels=ids)
    assert runs.take() == 3 * ONE_BY_ONE


def change_the_list(model: Any) -> None:
    body_of(model).layers = nn.ModuleList([*reversed(body_of(model).layers)])


def take_fewer(model: Any) -> None:
    body_of(model).config.num_hidden_layers = 1


def wrap(model: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
            return self.inner(2 * hidden, **kwargs)

    body_of(model).layers[1] = Wrapped(body_of(model).layers[1])


@pytest.mark.parametrize("change", [change_the_list, take_fewer, wrap])
def test_layers_that_are_called_in_another_way(change: Callable[[Any], None], runs: Runs) -> None:
    model: Any = adapted(base_model("llama"))
    ours, theirs = fused(model), fused(model)
    results(theirs)
    runs.take()
    for _ in range(2):
        results(ours)
    assert runs.take() == [*ONE_BY_ONE, *TOGETHER]
    for twin in (ours, theirs):
        change(twin)
        if change is take_fewer:
            for layer in layers_of(twin)[1:]:
                layer.requires_grad_(False)
    assert_equal(results(ours), results(theirs))
    assert LAYERS not in runs.take()


def test_a_layer_called_by_itself_runs_by_itself(runs: Runs) -> None:
    """As where somebody computes it again."""
    model: Any = fused(adapted(base_model("llama")))
    given: dict[str, Any] = {}
    first = layers_of(model)[0]
    handle = first.register_forward_pre_hook(
        lambda _m, args, kwargs: given.update(args=args, **kwargs), with_kwargs=True
    )
    results(model)
    handle.remove()
    for _ in range(2):
        results(model)
    hidden, *_ = given.pop("args")
    runs.take()
    first(hidden.detach(), **given)
    assert runs.take() == [1]


def test_hooks_for_all_modules_are_heeded(runs: Runs) -> None:
    model: Any = fused(adapted(base_model("llama")))
    for _ in range(2):
        results(model)
    runs.take()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        results(model)
    finally:
        handle.remove()
    assert runs.take() == ONE_BY_ONE


def test_what_is_handed_on_must_stay_as_it_is() -> None:
    model: Any = fused(adapted(base_model("llama")))
    for _ in range(2):
        results(model)
    first, second = layers_of(model)
    together = first.fused_parts.together
    for spoil in ("another", "changed", "layer"):
        result = torch.zeros(1, 2, 3)
        together._handed_on.begin(result)
        if spoil == "changed":
            result += 1
        with pytest.raises(RuntimeError, match="out of turn, or with something else"):
            together.hands_on(first if spoil == "layer" else second, result.clone() if spoil == "another" else result)
        assert not together.hands_on(second, result)


def test_a_copy_begins_anew(runs: Runs) -> None:
    model: Any = fused(adapted(base_model("llama")))
    for _ in range(2):
        results(model)
    runs.take()
    twin = copy.deepcopy(model)
    assert_equal(results(twin), results(model))
    assert runs.take() == [*ONE_BY_ONE, *TOGETHER]


def test_the_run_of_a_process_uses_it(tmp_path: Path, runs: Runs) -> None:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(60))
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "method": {"kind": "lora"},
            "data": {"path": str(tmp_path / "data.jsonl"), "seq_len": 64, "cache_dir": str(tmp_path / "cache")},
            "train": {"global_batch_size": 4, "max_steps": 4, "fused": "on"},
        }
    )
    train_here(make_run(tmp_path / "run", config, make_plan(config, micro=4)))
    first, *others = [length for length in runs.take() if length > 1]
    assert first > 1
    assert set(others) == {first}
