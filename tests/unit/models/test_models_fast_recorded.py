"""When passes through fused layers are recorded and replayed, with graphs that a CPU can run in the place of CUDA's;
tests/gpu has the real ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import is_fused, record_passes, release_recordings
from pantheraml.models.fast import recorded as subject
from tests.unit.models.test_models_fast import FUSED, IDS, adapted, assert_same, base_model, fused, randomise, results

OTHER_IDS = IDS.flip(0)


class OnCPU(subject.Recording):
    """Replays by running again."""

    made = 0

    def _capture(self, run: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        OnCPU.made += 1
        recording = self

        class Forward:
            def replay(self) -> None:
                for gradient in getattr(recording, "gradients", ()):  # as in memory that forward and backward share
                    gradient.fill_(torch.nan)
                with torch.enable_grad():
                    recording.out = run(*recording.inputs)  # type: ignore[attr-defined]
                if hasattr(recording, "result"):
                    recording.result.copy_(recording.out.detach())  # type: ignore[attr-defined]

        class Backward:
            def replay(self) -> None:
                recording.gradient_of_input, found = recording.go_back(recording.out, parameters)  # type: ignore[attr-defined]
                torch._foreach_copy_(recording.gradients, found)

        self.forward, self.backward = Forward(), Backward()
        self.forward.replay()
        self.result = self.out.detach().clone()  # type: ignore[attr-defined]
        self.gradient_of_result = torch.zeros_like(self.result)
        self.gradient_of_input, self.gradients = self.go_back(self.out, parameters)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCPU.made = 0
    monkeypatch.setattr(subject, "Recording", OnCPU)
    monkeypatch.setattr(subject.LayerGraphs, "_could_record", lambda *_: True)
    monkeypatch.setattr(subject.LayerGraphs, "_taken", lambda *_: 0)
    monkeypatch.setattr(subject.LayerGraphs, "_no_room", lambda *_: None)


def both(family: str = "llama", *, full: bool = False) -> tuple[Any, Any]:
    """The same fused model, with adapters or trained as a whole, with recording and without."""
    base = base_model(family).train()
    plain = fused(base if full else adapted(base))
    assert use_document_attention(plain) is None
    ours = copy.deepcopy(plain)
    record_passes(ours)
    return ours, plain


def warm_up(model: nn.Module) -> None:
    for _ in range(subject.PASSES_BEFORE):
        results(model)
    assert OnCPU.made == 0


def replays(model: Any) -> bool:
    """Whether a pass with gradients goes through a recording."""
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    names, pending = set(), [out.loss.grad_fn]
    while pending:
        node = pending.pop()
        names.add(type(node).__name__)
        pending += [following for following, _ in node.next_functions if following is not None]
    return "_ReplayBackward" in names


@pytest.mark.parametrize("family", FUSED)
def test_the_numbers_of_passes_that_are_not_recorded(family: str) -> None:
    ours, theirs = both(family)
    warm_up(ours)
    for turn, ids in enumerate((IDS, OTHER_IDS, IDS)):
        for model in (ours, theirs):
            randomise(model, seed=turn)
        assert_same(results(ours, input_ids=ids, labels=ids), results(theirs, input_ids=ids, labels=ids), tolerance=0)
    assert OnCPU.made == 1


@pytest.mark.parametrize("family", [family for family in FUSED if family != "qwen2"])
def test_every_gradient_where_all_is_trained(family: str) -> None:
    ours, theirs = both(family, full=True)
    warm_up(ours)
    for turn, ids in enumerate((IDS, OTHER_IDS, IDS)):
        for model in (ours, theirs):
            randomise(model, seed=turn)
        assert_same(results(ours, input_ids=ids, labels=ids), results(theirs, input_ids=ids, labels=ids), tolerance=0)
    assert OnCPU.made == 1
    assert replays(ours)


@pytest.mark.parametrize("dropped", [True, False], ids=["none", "zeros"])
@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_gradients_of_several_batches_add_up(full: bool, dropped: bool) -> None:
    ours, theirs = both(full=full)
    warm_up(ours)
    for _ in range(2):
        for model in (ours, theirs):
            model.zero_grad(set_to_none=dropped)
            for ids in (IDS, OTHER_IDS, IDS):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert_same_gradients(ours, theirs)
    assert OnCPU.made == 1
    assert replays(ours)


def assert_same_gradients(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            assert torch.equal(mine.grad, other.grad)


def recording_of(model: Any) -> Any:
    (layer, *_) = (layer for layer in model.modules() if is_fused(layer))
    (recording,) = layer.fused_parts.graphs._recorded.values()
    return recording


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_gradients_are_not_copied_and_move_away_if_they_are_added_to(full: bool) -> None:
    ours, _ = both(full=full)
    warm_up(ours)
    results(ours)
    recording = recording_of(ours)
    places = {gradient.data_ptr() for gradient in recording.gradients}
    parameters = [p for layer in ours.modules() if is_fused(layer) for p in layer.parameters() if p.requires_grad]
    assert {p.grad.data_ptr() for p in parameters} == places
    ours(input_ids=IDS, labels=IDS, use_cache=False)
    assert not {p.grad.data_ptr() for p in parameters} & places
    assert all(torch.isfinite(p.grad).all() for p in parameters)


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_gradients_that_somebody_keeps_stay_as_they_are(full: bool) -> None:
    ours, theirs = both(full=full)
    warm_up(ours)
    kept = []
    for model in (ours, theirs):
        results(model)
        mine = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        asked = []
        for ids in (OTHER_IDS, IDS):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            asked += [*torch.autograd.grad(loss, trained, retain_graph=True), *torch.autograd.grad(loss, trained)]
        kept.append([*mine, *asked])
    assert OnCPU.made == 1
    for found, wanted in zip(*kept, strict=True):
        torch.testing.assert_close(found, wanted)
    assert not replays(ours)
    del mine, asked, found, wanted
    kept.clear()
    assert replays(ours)


def test_gradients_asked_for_twice() -> None:
    ours, theirs = both(full=True)
    warm_up(ours)
    kept = []
    for model in (ours, theirs):
        model.zero_grad()
        out = model(input_ids=IDS, labels=IDS, use_cache=False)
        first = torch.autograd.grad(out.loss, list(model.parameters()), retain_graph=True)
        second = torch.autograd.grad(out.loss * 2, list(model.parameters()))
        kept.append([*first, *second])
    assert OnCPU.made == 1
    for found, wanted in zip(*kept, strict=True):
        torch.testing.assert_close(found, wanted)


def test_weights_that_moved_are_recorded_anew() -> None:
    ours, theirs = both(full=True)
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        weight = model.model.layers[1].mlp.up_proj.weight
        weight.data = 2 * weight.data
    assert not replays(ours)
    assert_same(results(ours), results(theirs), tolerance=0)


def test_the_embeddings_gradient() -> None:
    ours, theirs = both()
    for model in (ours, theirs):
        model.enable_input_require_grads()
        model.get_input_embeddings().weight.requires_grad_()
    warm_up(ours)
    assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.made == 1


def test_a_second_forward_pass_before_the_backward_pass_of_the_first() -> None:
    ours, theirs = both()
    warm_up(ours)
    for model in (ours, theirs):
        model.zero_grad()
        first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, OTHER_IDS))
        (first + 2 * second).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)
    assert replays(ours)


def test_a_pass_without_a_backward_pass_is_forgotten() -> None:
    ours, _ = both()
    warm_up(ours)
    ours(input_ids=IDS, labels=IDS, use_cache=False)
    assert replays(ours)


def test_a_second_backward_pass_costs_a_forward_pass_and_may_come_too_late() -> None:
    ours, theirs = both()
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
    with pytest.raises(RuntimeError, match="comes too late"):
        losses[0].backward()


def test_evaluation_between_forward_and_backward() -> None:
    ours, theirs = both()
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


def test_norms_that_are_trained_later_get_their_gradient() -> None:
    ours, theirs = both("qwen3")
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.requires_grad_()
    for _ in range(subject.PASSES_BEFORE + 1):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.made == 2
    assert all(p.grad is not None for name, p in ours.named_parameters() if "norm" in name)


def test_norms_of_heads_that_are_exchanged_are_seen() -> None:
    ours, theirs = both("qwen3")
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        norm = model.get_base_model().model.layers[1].self_attn.q_norm
        norm.weight = nn.Parameter(2 * norm.weight.detach(), requires_grad=False)
    assert not replays(ours)
    assert_same(results(ours), results(theirs), tolerance=0)


def test_hooks_on_what_is_kept_for_the_backward_pass_are_heeded() -> None:
    ours, _ = both()
    warm_up(ours)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert not replays(ours)
    assert replays(ours)
    for _ in range(3):
        checkpoint(lambda ids: ours(input_ids=ids, labels=ids).loss, IDS, use_reentrant=False).backward()


def test_layers_that_are_left_out_are_not_replayed() -> None:
    ours, theirs = both()
    warm_up(ours)
    assert replays(ours)
    for model in (ours, theirs):
        body = model.get_base_model().model
        body.layers = body.layers[:-1]
    for _ in range(2):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert not replays(ours)


def test_a_pass_that_did_not_reach_all_layers_ends_the_recording(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = both()
    warm_up(ours)
    assert replays(ours)
    ours.get_base_model().model.layers[0].fused_parts.graphs._handed_on.begin(torch.zeros(1))
    assert_same(results(ours), results(theirs), tolerance=0)
    assert "1 layers were left out of a pass" in caplog.text
    assert not replays(ours)


def computed_again(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda hidden, **kwargs: checkpoint(lambda x: call(x, **kwargs), hidden, use_reentrant=True)


def test_a_layer_that_is_called_by_itself_is_not_replayed() -> None:
    """As where somebody computes it again, without telling transformers."""
    found = []
    for model in both():
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()  # else nothing would be computed again
        for turn in range(subject.PASSES_BEFORE + 2):
            if turn > subject.PASSES_BEFORE:
                for layer in model.get_base_model().model.layers:
                    vars(layer)["_call_impl"] = computed_again(layer._call_impl)
            model.zero_grad()
            model(inputs_embeds=embedded, labels=IDS, use_cache=False).loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert OnCPU.made == 1
    assert found[0]
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


def test_memory_is_given_back() -> None:
    ours, _ = both()
    warm_up(ours)
    results(ours)
    graphs = ours.get_base_model().model.layers[0].fused_parts.graphs
    assert len(graphs._recorded) == 1
    release_recordings(ours)
    assert not graphs._recorded
    results(ours)
    assert len(graphs._recorded) == 1
    apply_checkpointing(ours, "full")
    results(ours)
    assert not graphs._recorded


def test_what_runs_as_ever() -> None:
    ours, theirs = both()
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
    assert OnCPU.made == 2, "checkpointing gave the first recording's memory back"
    # transformers asks layers for that by hooks, which then stay
    out, wanted = (model(input_ids=IDS, use_cache=False, output_hidden_states=True) for model in (ours, theirs))
    assert all(map(torch.equal, out.hidden_states, wanted.hidden_states))


def test_other_scalings_are_recorded_anew() -> None:
    ours, theirs = both()
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
    assert OnCPU.made == 2


def test_what_cannot_be_recorded_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(OnCPU, "_capture", fail)
    ours, theirs = both()
    for _ in range(subject.PASSES_BEFORE + 2):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert [record.message for record in caplog.records] == [
        "passes through the layers are not recorded as CUDA graphs: operation not permitted when stream is capturing"
    ]


def test_a_copy_records_for_itself_when_asked() -> None:
    ours, _ = both()
    warm_up(ours)
    assert replays(ours)
    twin = copy.deepcopy(ours)
    assert_same(results(twin), results(ours), tolerance=0)
    assert not replays(twin)


def test_trained_copies_of_norms_run_as_ever() -> None:
    """PEFT's `modules_to_save` trains a copy beside the norm itself."""
    base = base_model("qwen3").train()
    saved = adapted(base, modules_to_save=["q_norm", "k_norm"])
    theirs = fused(saved)
    assert use_document_attention(theirs) is None
    ours = copy.deepcopy(theirs)
    record_passes(ours)
    for _ in range(subject.PASSES_BEFORE + 1):
        assert_same(results(ours), results(theirs), tolerance=0)
    assert OnCPU.made == 0


@pytest.mark.parametrize("full", [False, True])
def test_recordings_of_weights_that_moved_are_dropped(full: bool) -> None:
    ours, theirs = both(full=full)
    graphs = next(layer for layer in ours.modules() if is_fused(layer)).fused_parts.graphs
    held = []
    for turn in range(subject.MOST_SHAPES + 1):
        for _ in range(subject.PASSES_BEFORE + 1):
            results(ours)
        assert OnCPU.made == turn + 1
        assert len(graphs._recorded) == len(graphs._passes) == len(graphs._bytes) == 1
        assert_same(results(ours), results(theirs), tolerance=0)
        for parameter in ours.parameters():
            if parameter.requires_grad:
                held.append(parameter.data)
                parameter.data = parameter.data.clone()
