"""Prelaunch: a pass launched before the model is called gives the same result, and runs once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.models.attention import use_document_attention
from pantheraml.models.causal_lm import FastCausalLM
from pantheraml.models.fast import enable_layer_graphs
from pantheraml.models.fast import prelaunch as subject
from tests.unit.models.fused_families import CHAINED
from tests.unit.models.test_models_fast import IDS, adapted, assert_same, base_model, fused, randomize, results
from tests.unit.models.test_models_fast_layer_graphs import OTHER_IDS, OnCPU, _on_a_cpu, warm_up

__all__ = ["_on_a_cpu"]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List with one entry per replayed forward."""
    starts: list[int] = []
    start = OnCPU.start

    def counted(self: Any, inputs: Any) -> None:
        starts.append(len(starts))
        start(self, inputs)

    monkeypatch.setattr(OnCPU, "start", counted)
    return starts


def prelaunch_pair(family: str = "llama") -> tuple[Any, Any]:
    """Return the same model, with prelaunch (already replayed once) and without."""
    plain = fused(adapted(base_model(family).train()))
    assert use_document_attention(plain) is None
    ours = copy.deepcopy(plain)
    ours.prelaunch = enable_layer_graphs(ours)
    warm_up(ours)
    results(ours)
    return ours, plain


def expect(model: Any, **batch: Any) -> None:
    """Announce the next batch, as a trainer does after a step."""
    model.zero_grad()
    FastCausalLM.expect(model, batch)


CAPTURED = [family for family in CHAINED if family not in ("granite", "ministral3")]
"""Granite scales its embeddings, and Ministral 3 its queries by their positions."""


def check(ours: Any, theirs: Any, ids: Tensor, **kwargs: Any) -> None:
    inputs = {"input_ids": ids, "labels": ids, **kwargs}
    assert_same(results(ours, **inputs), results(theirs, **inputs), tolerance=0)


@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS)], ids=["none", "ones"])
@pytest.mark.parametrize("family", CAPTURED)
def test_prelaunched_pass_is_used(replays: list[int], family: str, mask: Tensor | None) -> None:
    ours, theirs = prelaunch_pair(family)
    for index, ids in enumerate((OTHER_IDS, IDS, OTHER_IDS)):
        for model in (ours, theirs):
            randomize(model, seed=index)
        before = len(replays)
        expect(ours, input_ids=ids, attention_mask=mask)
        assert len(replays) == before + 1
        check(ours, theirs, ids, attention_mask=mask)
        assert len(replays) == before + 1


def test_adapters_changed_after_prelaunch_are_used(replays: list[int]) -> None:
    ours, theirs = prelaunch_pair()
    expect(ours, input_ids=IDS)
    with torch.no_grad():
        for model in (ours, theirs):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)
    check(ours, theirs, IDS)
    assert len(replays) == 3


def test_prelaunch_with_other_tokens_is_dropped(replays: list[int]) -> None:
    ours, theirs = prelaunch_pair()
    expect(ours, input_ids=IDS)
    check(ours, theirs, OTHER_IDS)
    ids = IDS.clone()
    expect(ours, input_ids=ids)
    ids[0, 0] += 1
    check(ours, theirs, ids)
    assert len(replays) == 5


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_prelaunch_with_other_documents_is_dropped(name: str) -> None:
    ours, theirs = prelaunch_pair()
    width = IDS.shape[1]
    positions = torch.arange(width)[None].repeat(len(IDS), 1)
    positions[:, width // 2 :] -= width // 2
    mask = torch.ones_like(IDS)
    mask[0, width // 2 :] = 0
    expect(ours, input_ids=IDS)
    check(ours, theirs, IDS, **{name: positions if name == "position_ids" else mask})


@pytest.mark.parametrize(
    "batch",
    [
        [IDS],
        {"labels": IDS},
        {"input_ids": IDS, "position_ids": IDS},
        {"input_ids": IDS, "attention_mask": IDS * 0},
        {"input_ids": IDS, "attention_mask": [[1, 1]]},
    ],
)
def test_no_prelaunch_for_incomplete_batches(replays: list[int], batch: Any) -> None:
    ours, _ = prelaunch_pair()
    ours.zero_grad()
    before = len(replays)
    FastCausalLM.expect(ours, batch)
    assert len(replays) == before


def test_prelaunch_does_not_overwrite_gradients(replays: list[int]) -> None:
    ours, theirs = prelaunch_pair()
    before = len(replays)
    FastCausalLM.expect(ours, {"input_ids": IDS})
    assert len(replays) == before
    results(theirs)
    check(ours, theirs, IDS)


def test_no_prelaunch_with_embedding_hooks(replays: list[int]) -> None:
    ours, theirs = prelaunch_pair()
    for model in (ours, theirs):
        model.get_base_model().model.embed_tokens.register_forward_hook(lambda _module, _args, out: out + 1)
    before = len(replays)
    expect(ours, input_ids=IDS)
    assert len(replays) == before
    check(ours, theirs, IDS)


def test_hook_added_after_prelaunch_is_honored() -> None:
    ours, theirs = prelaunch_pair()
    expect(ours, input_ids=IDS)
    for model in (ours, theirs):
        model.get_base_model().model.embed_tokens.register_forward_hook(lambda _module, _args, out: out + 1)
    check(ours, theirs, IDS)


def test_no_prelaunch_while_backward_is_pending(replays: list[int]) -> None:
    ours, theirs = prelaunch_pair()
    for model in (ours, theirs):
        model.zero_grad()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    before = len(replays)
    FastCausalLM.expect(ours, {"input_ids": OTHER_IDS})
    assert len(replays) == before
    loss.backward()
    theirs(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is other.grad is None or torch.equal(mine.grad, other.grad)


def test_unused_prelaunches_stop(replays: list[int]) -> None:
    ours, _ = prelaunch_pair()
    before = len(replays)
    for _ in range(5):
        expect(ours, input_ids=IDS)
    assert len(replays) == before + subject.MAX_MISSES


def body(model: Any) -> Any:
    return model.get_base_model().model


@pytest.mark.parametrize("which", ["embed_tokens", "norm"])
def test_weights_changed_after_prelaunch_are_used(which: str) -> None:
    ours, theirs = prelaunch_pair()
    expect(ours, input_ids=IDS)
    with torch.no_grad():
        for model in (ours, theirs):
            part = body(model).layers[0].input_layernorm if which == "norm" else body(model).embed_tokens
            part.weight.mul_(1.5)
    check(ours, theirs, IDS)


def test_embedding_unfrozen_after_prelaunch_gets_its_gradient() -> None:
    ours, theirs = prelaunch_pair()
    expect(ours, input_ids=IDS)
    for model in (ours, theirs):
        body(model).embed_tokens.weight.requires_grad_(True)
        model.zero_grad()
    check(ours, theirs, IDS)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, ids: Tensor) -> Any:
        return 2 * self.inner(ids)


def wrap(model: Any) -> None:
    body(model).embed_tokens = Doubled(body(model).embed_tokens)


def replace(model: Any) -> None:
    embedding = body(model).embed_tokens
    forward = embedding.forward
    embedding.forward = lambda ids: forward(ids) + 1


def give_positions(model: Any) -> None:
    def hook(_body: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": torch.arange(IDS.shape[1])[None] + 5}

    body(model).register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("change", [wrap, replace, give_positions])
@pytest.mark.parametrize("after_prelaunch", [False, True])
def test_changes_to_the_model_are_honored(change: Callable[[Any], None], after_prelaunch: bool) -> None:
    ours, theirs = prelaunch_pair()
    if after_prelaunch:
        expect(ours, input_ids=IDS)
    for model in (ours, theirs):
        change(model)
    for model in () if after_prelaunch else (ours, theirs):
        results(model)
        model.zero_grad()
    if not after_prelaunch:
        expect(ours, input_ids=IDS)
    check(ours, theirs, IDS)


def test_no_prelaunch_for_tokens_on_another_device(replays: list[int]) -> None:
    ours, _ = prelaunch_pair()
    before = len(replays)
    expect(ours, input_ids=IDS.to("meta"))
    assert len(replays) == before


def test_prelaunch_stops_after_mismatched_passes(replays: list[int]) -> None:
    """Over the same tokens but without adapters, as trainers do that compare with the reference model."""
    ours, theirs = prelaunch_pair()
    before = len(replays)
    for _ in range(5):
        expect(ours, input_ids=IDS)
        theirs.zero_grad()
        with torch.no_grad(), ours.disable_adapter():
            ours(input_ids=IDS)
        check(ours, theirs, IDS)
    assert len(replays) <= before + 5 + subject.MAX_MISSES


def test_failed_prelaunch_is_logged_and_disabled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = prelaunch_pair()
    tried = []

    def fails(*_: Any) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(OnCPU, "start", fails)
        for _ in range(3):
            expect(ours, input_ids=IDS)
    assert len(tried) == 1
    assert "no memory" in caplog.text
    check(ours, theirs, IDS)


def test_graphs_are_freed_when_replaced() -> None:
    ours, _ = prelaunch_pair()
    expect(ours, input_ids=IDS)
    graphs = weakref.ref(body(ours).layers[0].fused_parts.graphs)
    ours.prelaunch = enable_layer_graphs(ours)
    gc.collect()
    assert graphs() is None


def test_copied_model_does_not_prelaunch(replays: list[int]) -> None:
    ours, theirs = prelaunch_pair()
    expect(ours, input_ids=IDS)
    other = copy.deepcopy(ours)
    assert other.prelaunch is None
    assert pickle.loads(pickle.dumps(ours.prelaunch)) is None
    check(other, theirs, IDS)
    check(ours, theirs, IDS)
