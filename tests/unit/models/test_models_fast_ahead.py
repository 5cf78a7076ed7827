"""Passes that are replayed before they are looked at, with the graphs for a CPU of `test_models_fast_recorded`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pantheraml.engine.checkpointing import apply_checkpointing
from pantheraml.kernels.lora_columns import AdapterTable
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import fuse, record_passes, release_recordings
from pantheraml.models.fast import recorded as subject
from pantheraml.models.fast.groups import GroupSet
from pantheraml.models.quantise.packed import pack_linears
from tests.unit.models.test_models_fast import CPU, IDS, adapted, base_model, results
from tests.unit.models.test_models_fast_recorded import (
    OTHER_IDS,
    OnCPU,
    _on_a_cpu,  # noqa: F401
    both,
    recording_of,
    replays,
    warm_up,
)


class Starts:
    """How often a pass was replayed before it was looked at, and how often that was what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried = self.right = 0
        begin_ahead, finish = subject.LayerGraphs.begin_ahead, subject._Replay.forward

        def counted(graphs: Any, hidden: Tensor, arguments: dict[str, Any]) -> bool:
            tried = begin_ahead(graphs, hidden, arguments)
            self.tried += tried
            return tried

        def finished(ctx: Any, recording: Any, started: bool, *given: Tensor) -> Tensor:
            self.right += started
            return finish(ctx, recording, started, *given)

        monkeypatch.setattr(subject.LayerGraphs, "begin_ahead", counted)
        monkeypatch.setattr(subject._Replay, "forward", staticmethod(finished))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(monkeypatch)


def packed_both(kind: str) -> tuple[Any, Any]:
    """The same fused model over packed weights, fp8 in two layouts, with recording and without."""
    found = []
    for _ in range(2):
        base = base_model("llama", hidden_size=64, intermediate_size=64)
        pack_linears(base, kind, dtype=torch.float32, device=CPU)
        model = adapted(base)
        assert not fuse(model, layouts=2).reasons
        assert use_document_attention(model) is None
        found.append(model)
    record_passes(found[0])
    return found[0], found[1]


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "adapters": both,
    "norms of heads": lambda: both("qwen3"),
    "all is trained": lambda: both(full=True),
    "fp8": lambda: packed_both("fp8"),
    "nf4": lambda: packed_both("nf4"),
}


def losses(model: Any, steps: int) -> list[Tensor]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    found = []
    for step in range(steps):
        ids = (IDS, OTHER_IDS)[step % 2]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in trained)]


@pytest.mark.parametrize("name", MODELS)
def test_every_step_of_a_run_is_as_without(name: str, starts: Starts) -> None:
    ours, theirs = MODELS[name]()
    steps = subject.PASSES_BEFORE + 5
    found, wanted = losses(ours, steps), losses(theirs, steps)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[0], found[2])
    assert (starts.tried, starts.right) == (4, 4), "all but the first replay"


def test_the_replay_comes_before_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = both()
    warm_up(ours)
    events: list[str] = []
    results(ours)

    def note(kind: type, name: str) -> None:
        made = getattr(kind, name)

        def noted(*given: Any, **named: Any) -> Any:
            events.append(name)
            return made(*given, **named)

        monkeypatch.setattr(kind, name, noted)

    note(AdapterTable, "write")
    note(OnCPU, "start")
    note(OnCPU, "started")
    note(GroupSet, "refresh")
    note(subject.LayerGraphs, "_key")
    results(ours)
    assert events == ["write", "start", "refresh", "_key", "started"]


def body(model: Any) -> Any:
    return model.get_base_model().model


def query(model: Any) -> Any:
    return body(model).layers[1].self_attn.q_proj


def _switch_off(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _merge(model: Any) -> None:
    model.merge_adapter()


def _another_adapter(model: Any) -> None:
    torch.manual_seed(3)
    model.add_adapter("other", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "other" in name:
            parameter.data.normal_(std=0.15)
    model.set_adapter("other")


def _scale(model: Any) -> None:
    query(model).scaling["default"] *= 3


def _move_values(model: Any) -> None:
    weight = query(model).lora_B["default"].weight
    weight.data = weight.data * 2


def _exchange_a_parameter(model: Any) -> None:
    matrix = query(model).lora_A["default"]
    matrix.weight = nn.Parameter(matrix.weight.detach() * 2)


def _exchange_a_parameter_in_place(model: Any) -> None:
    matrix = query(model).lora_A["default"]
    matrix.weight = nn.Parameter(matrix.weight.detach())


def _exchange_a_norm(model: Any) -> None:
    norm = body(model).layers[1].post_attention_layernorm
    norm.weight = nn.Parameter(2 * norm.weight.detach(), requires_grad=False)


def _train_a_norm(model: Any) -> None:
    body(model).layers[0].input_layernorm.weight.requires_grad_()


def _freeze_an_adapter(model: Any) -> None:
    query(model).lora_A["default"].weight.requires_grad_(False)


def _hook_a_layer(model: Any) -> None:
    body(model).layers[1].register_forward_hook(lambda *given: 2 * given[-1])


def _hook_a_projection(model: Any) -> None:
    query(model).register_forward_hook(lambda *given: 2 * given[-1])


CHANGES = [
    _switch_off, _merge, _another_adapter, _scale, _move_values, _exchange_a_parameter, _exchange_a_parameter_in_place,
    _exchange_a_norm, _train_a_norm, _freeze_an_adapter, _hook_a_layer, _hook_a_projection,
]  # fmt: skip


def outcome(model: Any, **inputs: Any) -> list[Tensor]:
    """Logits, and all gradients that there are."""
    model.zero_grad()
    out = model(**{"input_ids": IDS, "labels": IDS, "use_cache": False, **inputs})
    if out.loss.requires_grad:
        out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("change", CHANGES)
def test_a_replay_that_was_wrong_is_dropped(change: Callable[[Any], None], starts: Starts) -> None:
    ours, theirs = both()
    warm_up(ours)
    results(ours)
    for model in (ours, theirs):
        model.zero_grad()  # also of parameters that are exchanged
        change(model)
    for turn, ids in enumerate((IDS, OTHER_IDS, IDS, OTHER_IDS, IDS)):
        assert_equal(outcome(ours, input_ids=ids), outcome(theirs, input_ids=ids))
        if turn == 0:
            assert (starts.tried, starts.right) == (1, 0)
        if turn == 1:
            assert starts.tried == 1, "after a pass that was not replayed"


def test_an_adapter_that_is_on_again(starts: Starts) -> None:
    ours, theirs = both()
    warm_up(ours)
    results(ours)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_equal(outcome(ours), outcome(theirs))
    for _ in range(2):
        assert_equal(outcome(ours), outcome(theirs))
    assert OnCPU.made == 1
    assert (starts.tried, starts.right) == (2, 1)


@contextmanager
def checkpointing(model: Any) -> Iterator[None]:
    apply_checkpointing(model, "full")
    yield


PADDED = torch.ones_like(IDS)
PADDED[0, -3:] = 0
OTHERS: dict[str, tuple[Callable[[Any], Any], dict[str, Tensor]]] = {
    "a shape": (lambda _: torch.enable_grad(), {"input_ids": IDS[:, 1:], "labels": IDS[:, 1:]}),
    "padding": (lambda _: torch.enable_grad(), {"attention_mask": PADDED}),
    "no gradients": (lambda _: torch.no_grad(), {}),
    "hooks": (lambda _: torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept), {}),
    "checkpointing": (checkpointing, {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_replayed_where_little_tells_that_it_would_be_wrong(name: str, starts: Starts) -> None:
    ours, theirs = both()
    warm_up(ours)
    results(ours)
    within, inputs = OTHERS[name]
    with within(ours), within(theirs):
        assert_equal(outcome(ours, **inputs), outcome(theirs, **inputs))
    assert starts.tried == 0
    for ids in (IDS, OTHER_IDS):
        assert_equal(outcome(ours, input_ids=ids), outcome(theirs, input_ids=ids))


def test_inputs_that_need_a_gradient_now(starts: Starts) -> None:
    ours, theirs = both()
    warm_up(ours)
    results(ours)
    for model in (ours, theirs):
        model.enable_input_require_grads()
        model.get_input_embeddings().weight.requires_grad_()
    assert_equal(outcome(ours), outcome(theirs))
    assert starts.tried == 0


@pytest.mark.parametrize("once", [False, True], ids=["the first", "a second"])
def test_not_while_a_backward_pass_may_come(once: bool, starts: Starts) -> None:
    ours, theirs = both()
    warm_up(ours)
    found = []
    for model in (ours, theirs):
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        if once:
            loss.backward(retain_graph=True)
            model.zero_grad()
        with model.disable_adapter():
            model(input_ids=OTHER_IDS, labels=OTHER_IDS, use_cache=False)
        loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*found)
    assert starts.tried == 0


def test_a_backward_pass_that_nobody_could_expect_is_an_error(starts: Starts) -> None:
    """Through the layers alone, which torch lets pass: they keep no tensors of autograd's."""
    ours, _ = both()
    warm_up(ours)
    given: list[Tensor] = []
    body(ours).norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    ours(input_ids=IDS, labels=IDS, use_cache=False)
    weight = query(ours).lora_B["default"].weight
    torch.autograd.grad(given[0].sum(), weight)
    with ours.disable_adapter():
        ours(input_ids=OTHER_IDS, labels=OTHER_IDS, use_cache=False)
    assert starts.tried == 1
    with pytest.raises(RuntimeError, match="comes too late"):
        torch.autograd.grad(given[0].sum(), weight)


def test_not_while_gradients_are_where_it_would_write(starts: Starts) -> None:
    ours, theirs = both()
    warm_up(ours)
    for model in (ours, theirs):
        model.zero_grad()
        for ids in (IDS, OTHER_IDS):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert starts.tried == 0
    for model in (ours, theirs):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert starts.right == 1, "they have moved away"
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert other.grad is None or torch.equal(mine.grad, other.grad)


def test_not_if_layers_were_left_out(starts: Starts) -> None:
    ours, _ = both()
    warm_up(ours)
    results(ours)
    left_out = body(ours).layers[-1]
    body(ours).layers = body(ours).layers[:-1]
    for _ in range(2):
        left_out.zero_grad()
        outcome(ours)
        assert (starts.tried, starts.right) == (1, 0)


def test_no_replay_of_what_was_released(starts: Starts) -> None:
    ours, _ = both()
    warm_up(ours)
    results(ours)
    kept = weakref.ref(recording_of(ours))
    release_recordings(ours)
    gc.collect()
    assert kept() is None
    results(ours)
    assert starts.tried == 0
    assert replays(ours)


def test_no_replay_after_an_error(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both()
    warm_up(ours)
    results(ours)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a look that fails")

    with monkeypatch.context() as patch:
        patch.setattr(GroupSet, "refresh", fail)
        ours.zero_grad()
        with pytest.raises(RuntimeError, match="a look that fails"):
            ours(input_ids=IDS)
    for tried in (1, 2):
        assert_equal(outcome(ours), outcome(theirs))
        assert starts.tried == tried
    assert starts.right == 1


class Kept:
    """The memory of tensors, which can be left for other memory of the same values."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._left = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.clone()

    def is_there(self) -> list[bool]:
        gc.collect()
        return [not kept.expired() for kept in self._left]


def norms_of_heads(model: Any) -> list[Tensor]:
    return [norm.weight for layer in body(model).layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]


READ: dict[str, Callable[[Any], list[Tensor]]] = {
    "all is trained": lambda model: list(model.model.layers.parameters()),
    "norms of heads": norms_of_heads,
    "nf4": lambda model: [query(model).base_layer.qweight, query(model).base_layer.scale_code],
}


@pytest.mark.parametrize("name", READ)
def test_memory_that_a_recording_reads_stays(name: str) -> None:
    ours, _ = MODELS[name]()
    warm_up(ours)
    results(ours)
    ours.zero_grad()
    memory = Kept(READ[name](ours))
    recording = recording_of(ours)
    recording.forward = recording.backward = recording.out = None  # on a CPU they keep what they run
    del recording
    assert all(memory.is_there())
    release_recordings(ours)
    assert not any(memory.is_there())


def test_a_table_reads_where_adapters_were() -> None:
    ours, _ = both()
    results(ours)
    shared = body(ours).layers[0].fused_parts.shared
    weight = query(ours).lora_A["default"].weight
    (places,) = (a.places for a in shared._tables[0].adapters if a.down.data_ptr() == weight.data_ptr())
    memory = Kept([weight])
    weight.data *= 2
    assert memory.is_there() == [True]
    before = places.matrix_down.clone()
    places.matrix_down.zero_()
    shared.write()
    assert torch.equal(places.matrix_down, before)
    results(ours)
    assert torch.equal(places.matrix_down, 2 * before)
    assert memory.is_there() == [False]
