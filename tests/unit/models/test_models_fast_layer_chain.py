"""Fused layers run as one chain: bitwise equal to one by one, and only where that is equivalent."""

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

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import autograd_functions as functions
from pantheraml.models.fast import enable_layer_chain, fuse, layers
from pantheraml.models.fast.linear_groups import LoraGroup
from pantheraml.models.fast.trainable_group import TrainableGroup
from pantheraml.models.quantize.fp8_training import use_fp8_matmuls
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here
from tests.unit.models.fused_families import CHAINED
from tests.unit.models.test_models_fast import IDS, LAYERS, adapted, base_model, quantize_to_fp8, results


def in_fp8(family: str) -> Any:
    return adapted(quantize_to_fp8(base_model(family)), size=0.05)


def trainable(family: str) -> Any:
    model = base_model(family)
    use_fp8_matmuls(model)
    return model.train()


MODELS: dict[str, Callable[[str], Any]] = {"lora": lambda f: adapted(base_model(f)), "fp8": in_fp8, "full": trainable}


class Runs:
    """Number of layers run by each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        real = layers._run_layers

        def run(some: Any, *args: Any, **options: Any) -> Tensor:
            self.lengths.append(len(some))
            return real(some, *args, **options)

        monkeypatch.setattr(layers, "_run_layers", run)

    def take(self) -> list[int]:
        lengths, self.lengths = self.lengths, []
        return lengths


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def fused(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    assert use_document_attention(twin) is None
    assert fuse(twin, compare=False).fused == LAYERS
    enable_layer_chain(twin)
    return twin


def layers_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "fused_parts")]


def body_of(model: Any) -> Any:
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name


ONE_BY_ONE, AS_CHAIN = [1] * LAYERS, [LAYERS]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("family", CHAINED)
def test_chain_is_bitwise_equal(family: str, kind: str, runs: Runs) -> None:
    if (family, kind) == ("qwen2", "full"):
        pytest.skip("its biases are trained")
    model = fused(MODELS[kind](family))
    first = results(model)
    assert runs.take() == ONE_BY_ONE
    second = results(model)
    assert runs.take() == AS_CHAIN
    assert_equal(second, first)


def test_layers_with_different_rope_tables_run_one_by_one(runs: Runs) -> None:
    model = fused(MODELS["lora"]("gemma3_text"))
    first = results(model)
    assert_equal(results(model), first)
    assert runs.take() == 2 * ONE_BY_ONE


def test_gradient_rows_are_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for the last layer's, which no norm follows."""
    calls: list[Any] = []
    for kind in (LoraGroup, TrainableGroup):
        real = kind.gradient_operand
        monkeypatch.setattr(kind, "gradient_operand", lambda self, g, real=real: calls.append(self) or real(self, g))
    for make in (in_fp8, trainable):
        model = fused(make("llama"))
        results(model)
        assert len(calls) == LAYERS
        calls.clear()
        results(model)
        assert len(calls) == 1
        calls.clear()


def test_residual_link_rejects_other_gradients() -> None:
    model: Any = fused(in_fp8("llama"))
    group = next(m for m in model.modules() if hasattr(m, "fused_parts")).fused_parts.groups[-1]
    link = functions.ResidualLink(group)
    gradient = torch.randn(5, group.height)
    rows = group.gradient_operand(gradient)
    link.offer(gradient, rows)
    assert link.take(gradient) is rows
    assert link.take(gradient) is not rows
    link.offer(gradient, rows)
    assert link.take(gradient.clone()) is not rows
    link.offer(gradient, rows)
    gradient *= 2
    assert torch.equal(link.take(gradient).scales, 2 * rows.scales)


def test_a_pass_leaves_no_reference_cycle() -> None:
    """Everything a pass saves is freed with its result."""
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
            pending += [next_node for next_node, _ in node.next_functions]
        actual = [node for node in nodes if "AfterAttention" in type(node).__name__]
        assert len(actual) == LAYERS
        recorded = [weakref.ref(node.link) for node in actual if node.link is not None]
        assert len(recorded) == LAYERS - 1
        del out, nodes, actual, node, pending
        assert all(link() is None for link in recorded)
    finally:
        gc.enable()


def test_hooked_layers_run_one_by_one(runs: Runs) -> None:
    model: Any = fused(in_fp8("llama"))
    results(model)
    results(model)
    runs.take()
    recorded: list[Tensor] = []
    inner = [m for m in model.modules() if hasattr(m, "fused_parts")]
    handle = inner[1].register_forward_hook(lambda _m, args, out: recorded.append(out))
    results(model)
    assert runs.take() == ONE_BY_ONE
    assert len(recorded) == 1
    handle.remove()
    results(model)
    assert runs.take() == AS_CHAIN
    with torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert runs.take() == ONE_BY_ONE
    with model.disable_adapter():
        model(input_ids=IDS, use_cache=False)
    assert runs.take() == []
    results(model)
    assert runs.take() == AS_CHAIN


def test_checkpointed_layers_run_one_by_one(runs: Runs) -> None:
    model = fused(in_fp8("llama"))
    expected = results(model)
    results(model)
    runs.take()
    apply_checkpointing(model, "full")
    assert_equal(results(model), expected)
    assert set(runs.take()) == {1}


def test_per_layer_masks_disable_the_chain(runs: Runs) -> None:
    """Short passes have no masks, so all layers get the same arguments."""
    model: Any = copy.deepcopy(adapted(base_model("qwen2")))
    assert fuse(model, compare=False).fused == LAYERS
    enable_layer_chain(model)  # attention stays torch's, with masks
    for ids in (IDS[:, :3], IDS, IDS):
        results(model, input_ids=ids, labels=ids)
    assert runs.take() == 3 * ONE_BY_ONE


def reverse_layers(model: Any) -> None:
    body_of(model).layers = nn.ModuleList([*reversed(body_of(model).layers)])


def use_fewer_layers(model: Any) -> None:
    body_of(model).config.num_hidden_layers = 1


def wrap(model: Any) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: Tensor, **kwargs: Any) -> Any:
            return self.inner(2 * hidden, **kwargs)

    body_of(model).layers[1] = Wrapped(body_of(model).layers[1])


@pytest.mark.parametrize("change", [reverse_layers, use_fewer_layers, wrap])
def test_changed_layer_order_disables_the_chain(change: Callable[[Any], None], runs: Runs) -> None:
    model: Any = adapted(base_model("llama"))
    ours, theirs = fused(model), fused(model)
    results(theirs)
    runs.take()
    for _ in range(2):
        results(ours)
    assert runs.take() == [*ONE_BY_ONE, *AS_CHAIN]
    for twin in (ours, theirs):
        change(twin)
        if change is use_fewer_layers:
            for layer in layers_of(twin)[1:]:
                layer.requires_grad_(False)
    assert_equal(results(ours), results(theirs))
    assert LAYERS not in runs.take()


def test_direct_layer_call_does_not_run_the_chain(runs: Runs) -> None:
    """As when a layer is recomputed."""
    model: Any = fused(adapted(base_model("llama")))
    arguments: dict[str, Any] = {}
    first = layers_of(model)[0]
    handle = first.register_forward_pre_hook(
        lambda _m, args, kwargs: arguments.update(args=args, **kwargs), with_kwargs=True
    )
    results(model)
    handle.remove()
    for _ in range(2):
        results(model)
    hidden, *_ = arguments.pop("args")
    runs.take()
    first(hidden.detach(), **arguments)
    assert runs.take() == [1]


def test_global_module_hooks_disable_the_chain(runs: Runs) -> None:
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


def test_chain_output_must_pass_through_unchanged() -> None:
    model: Any = fused(adapted(base_model("llama")))
    for _ in range(2):
        results(model)
    first, second = layers_of(model)
    chain = first.fused_parts.chain
    for fault in ("another", "changed", "layer"):
        result = torch.zeros(1, 2, 3)
        chain._output.begin(result)
        if fault == "changed":
            result += 1
        with pytest.raises(RuntimeError, match="out of order or with another input"):
            chain.is_passthrough(
                first if fault == "layer" else second, result.clone() if fault == "another" else result
            )
        assert not chain.is_passthrough(second, result)


def test_a_copied_model_starts_with_eager_layers(runs: Runs) -> None:
    model: Any = fused(adapted(base_model("llama")))
    for _ in range(2):
        results(model)
    runs.take()
    twin = copy.deepcopy(model)
    assert_equal(results(twin), results(model))
    assert runs.take() == [*ONE_BY_ONE, *AS_CHAIN]


def test_worker_run_uses_the_chain(tmp_path: Path, runs: Runs) -> None:
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
