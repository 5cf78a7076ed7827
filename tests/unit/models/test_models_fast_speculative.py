"""Speculative replay: passes replayed before validation, with the CPU graphs of `test_models_fast_recorded`."""

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

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.kernels.lora_columns import AdapterTable
from pantheraml.models.attention import use_document_attention
from pantheraml.models.fast import enable_layer_graphs, fuse, release_layer_graphs
from pantheraml.models.fast import layer_cuda_graphs as subject
from pantheraml.models.fast.group_set import GroupSet
from pantheraml.models.quantize.quantized_linear import quantize_linears
from tests.unit.models.test_models_fast import CPU, IDS, adapted, base_model, results
from tests.unit.models.test_models_fast_layer_graphs import (
    OTHER_IDS,
    OnCPU,
    _on_a_cpu,  # noqa: F401
    captured_pass,
    graph_pair,
    replays,
    warm_up,
)


class Starts:
    """Counts speculative replays, and those that were used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried = self.used = 0
        replay_speculatively, finish = subject.LayerGraphs.replay_speculatively, subject._Replay.forward

        def counted(graphs: Any, hidden: Tensor, arguments: dict[str, Any]) -> bool:
            tried = replay_speculatively(graphs, hidden, arguments)
            self.tried += tried
            return tried

        def counted_finish(ctx: Any, captured: Any, started: bool, *inputs: Tensor) -> Tensor:
            self.used += started
            return finish(ctx, captured, started, *inputs)

        monkeypatch.setattr(subject.LayerGraphs, "replay_speculatively", counted)
        monkeypatch.setattr(subject._Replay, "forward", staticmethod(counted_finish))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(monkeypatch)


def quantized_pair(kind: str) -> tuple[Any, Any]:
    """Return the same fused model over quantized weights with graphs and without."""
    collected = []
    for _ in range(2):
        base = base_model("llama", hidden_size=64, intermediate_size=64)
        quantize_linears(base, kind, dtype=torch.float32, device=CPU)
        model = adapted(base)
        assert not fuse(model).reasons
        assert use_document_attention(model) is None
        collected.append(model)
    enable_layer_graphs(collected[0])
    return collected[0], collected[1]


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "adapters": graph_pair,
    "head norms": lambda: graph_pair("qwen3"),
    "full fine-tuning": lambda: graph_pair(full=True),
    "fp8": lambda: quantized_pair("fp8"),
    "nf4": lambda: quantized_pair("nf4"),
}


def losses(model: Any, steps: int) -> list[Tensor]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    collected = []
    for step in range(steps):
        ids = (IDS, OTHER_IDS)[step % 2]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        collected.append(loss.detach())
    return [*collected, *(parameter.detach() for parameter in trained)]


@pytest.mark.parametrize("name", MODELS)
def test_run_with_graphs_is_bitwise_equal(name: str, starts: Starts) -> None:
    ours, theirs = MODELS[name]()
    steps = subject.WARMUP_PASSES + 5
    actual, expected = losses(ours, steps), losses(theirs, steps)
    assert all(map(torch.equal, actual, expected))
    assert not torch.equal(actual[0], actual[2])
    assert (starts.tried, starts.used) == (4, 4), "all but the first replay"


def test_replay_precedes_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    events: list[str] = []
    results(ours)

    def log_call(kind: type, name: str) -> None:
        made = getattr(kind, name)

        def logged(*inputs: Any, **named: Any) -> Any:
            events.append(name)
            return made(*inputs, **named)

        monkeypatch.setattr(kind, name, logged)

    log_call(AdapterTable, "write")
    log_call(OnCPU, "start")
    log_call(OnCPU, "started")
    log_call(GroupSet, "refresh")
    log_call(subject.LayerGraphs, "_key")
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
    body(model).layers[1].register_forward_hook(lambda *inputs: 2 * inputs[-1])


def _hook_a_projection(model: Any) -> None:
    query(model).register_forward_hook(lambda *inputs: 2 * inputs[-1])


CHANGES = [
    _switch_off, _merge, _another_adapter, _scale, _move_values, _exchange_a_parameter, _exchange_a_parameter_in_place,
    _exchange_a_norm, _train_a_norm, _freeze_an_adapter, _hook_a_layer, _hook_a_projection,
]  # fmt: skip


def outcome(model: Any, **inputs: Any) -> list[Tensor]:
    """Return logits and all gradients."""
    model.zero_grad()
    out = model(**{"input_ids": IDS, "labels": IDS, "use_cache": False, **inputs})
    if out.loss.requires_grad:
        out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_speculative_replay_is_dropped(change: Callable[[Any], None], starts: Starts) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    results(ours)
    for model in (ours, theirs):
        model.zero_grad()  # including parameters that are about to be replaced
        change(model)
    for index, ids in enumerate((IDS, OTHER_IDS, IDS, OTHER_IDS, IDS)):
        assert_equal(outcome(ours, input_ids=ids), outcome(theirs, input_ids=ids))
        if index == 0:
            assert (starts.tried, starts.used) == (1, 0)
        if index == 1:
            assert starts.tried == 1, "after a pass that was not replayed"


def test_reenabled_adapter_is_replayed(starts: Starts) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    results(ours)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_equal(outcome(ours), outcome(theirs))
    for _ in range(2):
        assert_equal(outcome(ours), outcome(theirs))
    assert OnCPU.captures == 1
    assert (starts.tried, starts.used) == (2, 1)


@contextmanager
def checkpointing(model: Any) -> Iterator[None]:
    apply_checkpointing(model, "full")
    yield


PADDED = torch.ones_like(IDS)
PADDED[0, -3:] = 0
NOT_REPLAYED: dict[str, tuple[Callable[[Any], Any], dict[str, Tensor]]] = {
    "a shape": (lambda _: torch.enable_grad(), {"input_ids": IDS[:, 1:], "labels": IDS[:, 1:]}),
    "padding": (lambda _: torch.enable_grad(), {"attention_mask": PADDED}),
    "no gradients": (lambda _: torch.no_grad(), {}),
    "hooks": (lambda _: torch.autograd.graph.saved_tensors_hooks(lambda storage: storage, lambda storage: storage), {}),
    "checkpointing": (checkpointing, {}),
}


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_cheap_checks_prevent_speculative_replay(name: str, starts: Starts) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    results(ours)
    context, inputs = NOT_REPLAYED[name]
    with context(ours), context(theirs):
        assert_equal(outcome(ours, **inputs), outcome(theirs, **inputs))
    assert starts.tried == 0
    for ids in (IDS, OTHER_IDS):
        assert_equal(outcome(ours, input_ids=ids), outcome(theirs, input_ids=ids))


def test_inputs_that_start_to_require_grad(starts: Starts) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    results(ours)
    for model in (ours, theirs):
        model.enable_input_require_grads()
        model.get_input_embeddings().weight.requires_grad_()
    assert_equal(outcome(ours), outcome(theirs))
    assert starts.tried == 0


@pytest.mark.parametrize("once", [False, True], ids=["the first", "a second"])
def test_no_speculative_replay_while_backward_is_pending(once: bool, starts: Starts) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    collected = []
    for model in (ours, theirs):
        model.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        if once:
            loss.backward(retain_graph=True)
            model.zero_grad()
        with model.disable_adapter():
            model(input_ids=OTHER_IDS, labels=OTHER_IDS, use_cache=False)
        loss.backward()
        collected.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal(*collected)
    assert starts.tried == 0


def test_late_backward_through_the_layers_alone_raises(starts: Starts) -> None:
    """Torch does not detect it: the layers save no tensors with autograd."""
    ours, _ = graph_pair()
    warm_up(ours)
    inputs: list[Tensor] = []
    body(ours).norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    ours(input_ids=IDS, labels=IDS, use_cache=False)
    weight = query(ours).lora_B["default"].weight
    torch.autograd.grad(inputs[0].sum(), weight)
    with ours.disable_adapter():
        ours(input_ids=OTHER_IDS, labels=OTHER_IDS, use_cache=False)
    assert starts.tried == 1
    with pytest.raises(RuntimeError, match="came too late"):
        torch.autograd.grad(inputs[0].sum(), weight)


def test_no_speculative_replay_over_live_gradients(starts: Starts) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    for model in (ours, theirs):
        model.zero_grad()
        for ids in (IDS, OTHER_IDS):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert starts.tried == 0
    for model in (ours, theirs):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert starts.used == 1, "gradients have moved away"
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert other.grad is None or torch.equal(mine.grad, other.grad)


def test_no_replay_after_layers_were_removed(starts: Starts) -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    results(ours)
    removed = body(ours).layers[-1]
    body(ours).layers = body(ours).layers[:-1]
    for _ in range(2):
        removed.zero_grad()
        outcome(ours)
        assert (starts.tried, starts.used) == (1, 0)


def test_released_graphs_are_not_replayed(starts: Starts) -> None:
    ours, _ = graph_pair()
    warm_up(ours)
    results(ours)
    storage = weakref.ref(captured_pass(ours))
    release_layer_graphs(ours)
    gc.collect()
    assert storage() is None
    results(ours)
    assert starts.tried == 0
    assert replays(ours)


def test_no_replay_after_an_error(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = graph_pair()
    warm_up(ours)
    results(ours)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("refresh failed")

    with monkeypatch.context() as patch:
        patch.setattr(GroupSet, "refresh", fail)
        ours.zero_grad()
        with pytest.raises(RuntimeError, match="refresh failed"):
            ours(input_ids=IDS)
    for tried in (1, 2):
        assert_equal(outcome(ours), outcome(theirs))
        assert starts.tried == tried
    assert starts.used == 1


class OldMemory:
    """The tensors' old memory, after they moved to new memory of the same values."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        for tensor in tensors:
            tensor.data = tensor.data.clone()

    def is_alive(self) -> list[bool]:
        gc.collect()
        return [not storage.expired() for storage in self._storages]


def norms_of_heads(model: Any) -> list[Tensor]:
    return [norm.weight for layer in body(model).layers for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm)]


TENSORS_READ: dict[str, Callable[[Any], list[Tensor]]] = {
    "full fine-tuning": lambda model: list(model.model.layers.parameters()),
    "head norms": norms_of_heads,
    "nf4": lambda model: [query(model).base_layer.qweight, query(model).base_layer.scale_code],
}


@pytest.mark.parametrize("name", TENSORS_READ)
def test_captured_pass_keeps_its_inputs_alive(name: str) -> None:
    ours, _ = MODELS[name]()
    warm_up(ours)
    results(ours)
    ours.zero_grad()
    memory = OldMemory(TENSORS_READ[name](ours))
    captured = captured_pass(ours)
    captured.forward = captured.backward = captured.out = None  # on a CPU these hold references to what they run
    del captured
    assert all(memory.is_alive())
    release_layer_graphs(ours)
    assert not any(memory.is_alive())


def test_adapter_table_keeps_old_memory_alive_until_refresh() -> None:
    ours, _ = graph_pair()
    results(ours)
    shared = body(ours).layers[0].fused_parts.shared
    weight = query(ours).lora_A["default"].weight
    (buffers,) = (a.buffers for a in shared._tables[0].adapters if a.down.data_ptr() == weight.data_ptr())
    memory = OldMemory([weight])
    weight.data *= 2
    assert memory.is_alive() == [True]
    before = buffers.matrix_down.clone()
    buffers.matrix_down.zero_()
    shared.write()
    assert torch.equal(buffers.matrix_down, before)
    results(ours)
    assert torch.equal(buffers.matrix_down, 2 * before)
    assert memory.is_alive() == [False]
