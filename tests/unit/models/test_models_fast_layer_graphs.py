"""When passes through fused layers are captured and replayed, with graphs emulated on a CPU.

tests/gpu has the real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import enable_layer_graphs, is_fused, release_layer_graphs
from pantheraml.models.fast import layer_cuda_graphs as subject
from tests.unit.models.fused_families import CHAINED
from tests.unit.models.test_models_fast import IDS, adapted, assert_same, base_model, fused, randomize, results

OTHER_IDS = IDS.flip(0)


class OnCPU(subject.CapturedPass):
    """Replays by running eagerly."""

    captures = 0

    def _capture(self, run: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        OnCPU.captures += 1
        captured = self

        class Forward:
            def replay(self) -> None:
                for gradient in getattr(captured, "gradients", ()):  # forward and backward share a memory pool
                    gradient.fill_(torch.nan)
                with torch.enable_grad():
                    captured.out = run(*captured.inputs)  # type: ignore[attr-defined]
                if hasattr(captured, "result"):
                    captured.result.copy_(captured.out.detach())  # type: ignore[attr-defined]

        class Backward:
            def replay(self) -> None:
                captured.grad_input, actual = captured.run_backward(captured.out, parameters)  # type: ignore[attr-defined]
                torch._foreach_copy_(captured.gradients, actual)

        self.forward, self.backward = Forward(), Backward()
        self.forward.replay()
        self.result = self.out.detach().clone()  # type: ignore[attr-defined]
        self.grad_output = torch.zeros_like(self.result)
        self.grad_input, self.gradients = self.run_backward(self.out, parameters)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCPU.captures = 0
    monkeypatch.setattr(subject, "CapturedPass", OnCPU)
    monkeypatch.setattr(subject.LayerGraphs, "_can_capture", lambda *_: True)
    monkeypatch.setattr(subject.LayerGraphs, "_allocated_bytes", lambda *_: 0)
    monkeypatch.setattr(subject.LayerGraphs, "_lacks_memory", lambda *_: None)


def graph_pair(family: str = "llama", *, full: bool = False) -> tuple[Any, Any]:
    """Return the same fused model, with adapters or fully trainable, with graphs and without."""
    base = base_model(family).train()
    plain = fused(base if full else adapted(base))
    assert use_document_attention(plain) is None
    ours = copy.deepcopy(plain)
    enable_layer_graphs(ours)
    return ours, plain


def warm_up(model: nn.Module) -> None:
    for _ in range(subject.WARMUP_PASSES):
        results(model)
    assert OnCPU.captures == 0


def replays(model: Any) -> bool:
    """Return whether a pass with gradients is replayed."""
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    names, pending = set(), [out.loss.grad_fn]
    while pending:
        node = pending.pop()
        names.add(type(node).__name__)
        pending += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return "_ReplayBackward" in names


CAPTURED = [family for family in CHAINED if family != "ministral3"]


def test_passes_that_read_positions_are_not_captured() -> None:
    ours, theirs = graph_pair("ministral3")
    warm_up(ours)
    assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.captures == 0
    assert not replays(ours)


@pytest.mark.parametrize("family", CAPTURED)
def test_replay_matches_eager(family: str) -> None:
    ours, theirs = graph_pair(family)
    warm_up(ours)
    for index, ids in enumerate((IDS, OTHER_IDS, IDS)):
        for model in (ours, theirs):
            randomize(model, seed=index)
        assert_same(results(ours, input_ids=ids, labels=ids), results(theirs, input_ids=ids, labels=ids), tolerance=0)
    assert OnCPU.captures == 1


@pytest.mark.parametrize("family", [family for family in CAPTURED if family != "qwen2"])
def test_replay_matches_with_full_finetuning(family: str) -> None:
    ours, theirs = graph_pair(family, full=True)
    warm_up(ours)
    for index, ids in enumerate((IDS, OTHER_IDS, IDS)):
        for model in (ours, theirs):
            randomize(model, seed=index)
        assert_same(results(ours, input_ids=ids, labels=ids), results(theirs, input_ids=ids, labels=ids), tolerance=0)
    assert OnCPU.captures == 1
    assert replays(ours)


@pytest.mark.parametrize("dropped", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_gradient_accumulation(full: bool, dropped: bool) -> None:
    ours, theirs = graph_pair(full=full)
    warm_up(ours)
    for _ in range(2):
        for model in (ours, theirs):
            model.zero_grad(set_to_none=dropped)
            for ids in (IDS, OTHER_IDS, IDS):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert_same_gradients(ours, theirs)
    assert OnCPU.captures == 1
    assert replays(ours)


def assert_same_gradients(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert torch.equal(mine.grad, other.grad)


def captured_pass(model: Any) -> Any:
    (layer, *_) = (layer for layer in model.modules() if is_fused(layer))
    (captured,) = layer.fused_parts.graphs._captured.values()
    return captured


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_gradients_stay_in_graph_memory_until_accumulated(full: bool) -> None:
    ours, _ = graph_pair(full=full)
    warm_up(ours)
    results(ours)
    captured = captured_pass(ours)
    addresses = {gradient.data_ptr() for gradient in captured.gradients}
    parameters = [p for layer in ours.modules() if is_fused(layer) for p in layer.parameters() if p.requires_grad]
    assert {p.grad.data_ptr() for p in parameters} == addresses
    ours(input_ids=IDS, labels=IDS, use_cache=False)
    assert not {p.grad.data_ptr() for p in parameters} & addresses
    assert all(torch.isfinite(p.grad).all() for p in parameters)


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_held_gradients_are_not_overwritten(full: bool) -> None:
    ours, theirs = graph_pair(full=full)
    warm_up(ours)
    held = []
    for model in (ours, theirs):
        results(model)
        mine = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        requested = []
        for ids in (OTHER_IDS, IDS):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            requested += [*torch.autograd.grad(loss, trained, retain_graph=True), *torch.autograd.grad(loss, trained)]
        held.append([*mine, *requested])
    assert OnCPU.captures == 1
    for actual, expected in zip(*held, strict=True):
        torch.testing.assert_close(actual, expected)
    assert not replays(ours)
    del mine, requested, actual, expected
    held.clear()
    assert replays(ours)


def test_autograd_grad_twice() -> None:
    ours, theirs = graph_pair(full=True)
    warm_up(ours)
    held = []
    for model in (ours, theirs):
        model.zero_grad()
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        first = torch.autograd.grad(out.loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(out.loss * 2, list(model.parameters()))
        held.append([*first, *second])
    assert OnCPU.captures == 1
    for actual, expected in zip(*held, strict=True):
        torch.testing.assert_close(actual, expected)


def test_moved_weights_are_captured_again() -> None:
    ours, theirs = graph_pair(full=True)
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = 2 * weight.data
    assert not replays(ours)
    assert_same(results(ours), results(theirs), tolerance=0)


def test_embedding_gradient() -> None:
    ours, theirs = graph_pair()
    for model in (ours, theirs):
        model.enable_input_require_grads()
        model.get_input_embeddings().weight.requires_grad_()
    warm_up(ours)
    assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.captures == 1


def test_two_forwards_before_one_backward() -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    for model in (ours, theirs):
        model.zero_grad()
        first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, OTHER_IDS))
        (first + 2 * second).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    assert replays(ours)


def test_forward_without_backward_frees_the_graph() -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    ours(input_ids=IDS, labels=IDS, use_cache=False)
    assert replays(ours)


def test_second_backward_replays_forward_and_raises_if_late() -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    losses = [model(input_ids=IDS, labels=IDS, use_cache=False).loss for model in (ours, theirs)]
    for model, loss in zip((ours, theirs), losses, strict=True):
        model.zero_grad()
        for _ in range(2):
            loss.backward(retain_graph=True)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    assert replays(ours)
    with pytest.raises(RuntimeError, match="came too late"):
        losses[0].backward()


def test_evaluation_between_forward_and_backward() -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    for model in (ours, theirs):
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        with torch.no_grad():
            model(input_ids=OTHER_IDS)
        loss.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert torch.equal(mine.grad, other.grad)


def test_norms_unfrozen_later_get_gradients() -> None:
    ours, theirs = graph_pair("qwen3")
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.requires_grad_()
    for _ in range(subject.WARMUP_PASSES + 1):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.captures == 2
    assert all(p.grad is not None for name, p in ours.named_parameters() if "norm" in name)


def test_exchanged_head_norms_are_used() -> None:
    ours, theirs = graph_pair("qwen3")
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        norm = model.get_base_model().model.layers[1].self_attn.q_norm
        norm.weight = nn.Parameter(2 * norm.weight.detach(), requires_grad=False)
    assert not replays(ours)
    assert_same(results(ours), results(theirs), tolerance=0)


def test_saved_tensor_hooks_disable_replay() -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    with torch.autograd.graph.saved_tensors_hooks(lambda held: held, lambda held: held):
        assert not replays(ours)
    assert replays(ours)
    for _ in range(3):
        checkpoint(lambda ids: ours(input_ids=ids, labels=ids).loss, IDS, use_reentrant=False).backward()


def test_removed_layers_disable_replay() -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        body = model.get_base_model().model
        body.layers = body.layers[:-1]
    for _ in range(2):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert not replays(ours)


def test_skipped_layers_disable_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    assert replays(ours)
    ours.get_base_model().model.layers[0].fused_parts.graphs._output.begin(torch.zeros(1))
    assert_same(results(ours), results(theirs), tolerance=0)
    assert "1 layers were skipped in a pass" in caplog.text
    assert not replays(ours)


def checkpointed(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda hidden, **kwargs: checkpoint(lambda x: call(x, **kwargs), hidden, use_reentrant=True)


def test_direct_layer_call_is_not_replayed() -> None:
    """As when a layer is recomputed without transformers knowing."""
    collected = []
    for model in graph_pair():
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()  # otherwise nothing would be recomputed
        for index in range(subject.WARMUP_PASSES + 2):
            if index > subject.WARMUP_PASSES:
                for layer in model.get_base_model().model.layers:
                    vars(layer)["_call_impl"] = checkpointed(layer._call_impl)
            model.zero_grad()
            model(inputs_embeds=embedded, labels=IDS, use_cache=False).loss.backward()
        collected.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert OnCPU.captures == 1
    assert collected[0]
    for mine, other in zip(*collected, strict=True):
        assert torch.equal(mine, other)


def test_release_frees_memory() -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    results(ours)
    graphs = ours.get_base_model().model.layers[0].fused_parts.graphs
    assert len(graphs._captured) == 1
    release_layer_graphs(ours)
    assert not graphs._captured
    results(ours)
    assert len(graphs._captured) == 1
    apply_checkpointing(ours, "full")
    results(ours)
    assert not graphs._captured


def test_cases_that_run_eagerly() -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    assert replays(ours)
    padded = torch.ones_like(IDS)
    padded[0, -3:] = 0
    layer = ours.get_base_model().model.layers[1]
    assert_same(results(ours, attention_mask=padded), results(theirs, attention_mask=padded), tolerance=0)
    handle = layer.register_forward_hook(lambda *_: None)
    assert not replays(ours)
    handle.remove()
    apply_checkpointing(ours, "full")
    assert not replays(ours)
    apply_checkpointing(ours, "none")
    with ours.disable_adapter(), theirs.disable_adapter():
        assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    with torch.no_grad():
        assert torch.equal(ours(input_ids=IDS).logits, theirs(input_ids=IDS).logits)
    assert replays(ours)
    assert OnCPU.captures == 2, "checkpointing released the first graphs"
    # transformers uses hooks for hidden states, which then stay
    out, expected = (model(input_ids=IDS, use_cache=False, output_hidden_states=True) for model in (ours, theirs))
    assert all(map(torch.equal, out.hidden_states, expected.hidden_states))


def test_changed_scaling_is_captured_again() -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 0.5)
    assert not replays(ours)
    assert_same(results(ours), results(theirs), tolerance=0)
    results(ours)
    assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.captures == 2


def test_failed_capture_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(OnCPU, "_capture", fail)
    ours, theirs = graph_pair()
    for _ in range(subject.WARMUP_PASSES + 2):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert [record.message for record in caplog.records] == [
        "decoder layers are not captured as CUDA graphs: operation not permitted when stream is capturing"
    ]


def test_a_copied_model_has_no_graphs() -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    assert replays(ours)
    twin = copy.deepcopy(ours)
    assert_same(results(twin), results(ours), tolerance=0)
    assert not replays(twin)


def test_modules_to_save_norms_run_eagerly() -> None:
    """PEFT's `modules_to_save` trains a copy beside the norm itself."""
    base = base_model("qwen3").train()
    saved = adapted(base, modules_to_save=["q_norm", "k_norm"])
    theirs = fused(saved)
    assert use_document_attention(theirs) is None
    ours = copy.deepcopy(theirs)
    enable_layer_graphs(ours)
    for _ in range(subject.WARMUP_PASSES + 1):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.captures == 0


@pytest.mark.parametrize("full", [False, True])
def test_graphs_of_moved_weights_are_dropped(full: bool) -> None:
    ours, theirs = graph_pair(full=full)
    graphs = next(layer for layer in ours.modules() if is_fused(layer)).fused_parts.graphs
    held = []
    for index in range(subject.MAX_SHAPES + 1):
        for _ in range(subject.WARMUP_PASSES + 1):
            results(ours)
        assert OnCPU.captures == index + 1
        assert len(graphs._captured) == len(graphs._warmup_counts) == len(graphs._saved_bytes) == 1
        assert_same(results(ours), results(theirs), tolerance=0)
        for parameter in ours.parameters():
            if parameter.requires_grad:
                held.append(parameter.data)
                parameter.data = parameter.data.clone()
