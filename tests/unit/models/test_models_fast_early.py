"""A pass that begins before the model is called gives what it would have given, and runs once."""

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
from pantheraml.models.fast import early as subject
from pantheraml.models.fast import record_passes
from tests.unit.models.test_models_fast import FUSED, IDS, adapted, assert_same, base_model, fused, randomise, results
from tests.unit.models.test_models_fast_recorded import OTHER_IDS, OnCPU, _on_a_cpu, warm_up

__all__ = ["_on_a_cpu"]


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each forward pass that was replayed."""
    found: list[int] = []
    start = OnCPU.start

    def counted(self: Any, given: Any) -> None:
        found.append(len(found))
        start(self, given)

    monkeypatch.setattr(OnCPU, "start", counted)
    return found


def both(family: str = "llama") -> tuple[Any, Any]:
    """The same model, one of which can begin early; it has been replayed."""
    plain = fused(adapted(base_model(family).train()))
    assert use_document_attention(plain) is None
    ours = copy.deepcopy(plain)
    ours.early = record_passes(ours)
    warm_up(ours)
    results(ours)
    return ours, plain


def expect(model: Any, **batch: Any) -> None:
    """As a trainer does after a step."""
    model.zero_grad()
    FastCausalLM.expect(model, batch)


def check(ours: Any, theirs: Any, ids: Tensor, **named: Any) -> None:
    given = {"input_ids": ids, "labels": ids, **named}
    assert_same(results(ours, **given), results(theirs, **given), tolerance=0)


@pytest.mark.parametrize("mask", [None, torch.ones_like(IDS)], ids=["none", "ones"])
@pytest.mark.parametrize("family", FUSED)
def test_what_was_begun_is_used(replays: list[int], family: str, mask: Tensor | None) -> None:
    ours, theirs = both(family)
    for turn, ids in enumerate((OTHER_IDS, IDS, OTHER_IDS)):
        for model in (ours, theirs):
            randomise(model, seed=turn)
        before = len(replays)
        expect(ours, input_ids=ids, attention_mask=mask)
        assert len(replays) == before + 1
        check(ours, theirs, ids, attention_mask=mask)
        assert len(replays) == before + 1


def test_adapters_that_changed_since_count(replays: list[int]) -> None:
    ours, theirs = both()
    expect(ours, input_ids=IDS)
    with torch.no_grad():
        for model in (ours, theirs):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)
    check(ours, theirs, IDS)
    assert len(replays) == 3


def test_other_tokens_are_what_counts(replays: list[int]) -> None:
    ours, theirs = both()
    expect(ours, input_ids=IDS)
    check(ours, theirs, OTHER_IDS)
    ids = IDS.clone()
    expect(ours, input_ids=ids)
    ids[0, 0] += 1
    check(ours, theirs, ids)
    assert len(replays) == 5


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_other_documents_are_what_counts(name: str) -> None:
    ours, theirs = both()
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
def test_nothing_is_begun_where_more_must_be_known(replays: list[int], batch: Any) -> None:
    ours, _ = both()
    ours.zero_grad()
    before = len(replays)
    FastCausalLM.expect(ours, batch)
    assert len(replays) == before


def test_gradients_that_are_still_there_are_not_written_over(replays: list[int]) -> None:
    ours, theirs = both()
    before = len(replays)
    FastCausalLM.expect(ours, {"input_ids": IDS})
    assert len(replays) == before
    results(theirs)
    check(ours, theirs, IDS)


def test_nothing_is_begun_where_others_change_what_is_embedded(replays: list[int]) -> None:
    ours, theirs = both()
    for model in (ours, theirs):
        model.get_base_model().model.embed_tokens.register_forward_hook(lambda _module, _args, out: out + 1)
    before = len(replays)
    expect(ours, input_ids=IDS)
    assert len(replays) == before
    check(ours, theirs, IDS)


def test_a_hook_that_comes_after_the_beginning_counts() -> None:
    ours, theirs = both()
    expect(ours, input_ids=IDS)
    for model in (ours, theirs):
        model.get_base_model().model.embed_tokens.register_forward_hook(lambda _module, _args, out: out + 1)
    check(ours, theirs, IDS)


def test_nothing_is_begun_while_a_backward_pass_may_come(replays: list[int]) -> None:
    ours, theirs = both()
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


def test_what_is_never_used_is_not_begun_for_ever(replays: list[int]) -> None:
    ours, _ = both()
    before = len(replays)
    for _ in range(5):
        expect(ours, input_ids=IDS)
    assert len(replays) == before + subject.MOST_MISSES


def body(model: Any) -> Any:
    return model.get_base_model().model


@pytest.mark.parametrize("which", ["embed_tokens", "norm"])
def test_other_weights_that_changed_since_count(which: str) -> None:
    ours, theirs = both()
    expect(ours, input_ids=IDS)
    with torch.no_grad():
        for model in (ours, theirs):
            part = body(model).layers[0].input_layernorm if which == "norm" else body(model).embed_tokens
            part.weight.mul_(1.5)
    check(ours, theirs, IDS)


def test_an_embedding_that_is_trained_since_gets_its_gradient() -> None:
    ours, theirs = both()
    expect(ours, input_ids=IDS)
    for model in (ours, theirs):
        body(model).embed_tokens.weight.requires_grad_(True)
        model.zero_grad()
    check(ours, theirs, IDS)


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, ids: Tensor) -> Any:
        return 2 * self.inner(ids)


def wrap(model: Any) -> None:
    body(model).embed_tokens = Twice(body(model).embed_tokens)


def replace(model: Any) -> None:
    embedding = body(model).embed_tokens
    forward = embedding.forward
    embedding.forward = lambda ids: forward(ids) + 1


def give_positions(model: Any) -> None:
    def hook(_body: Any, args: Any, named: dict[str, Any]) -> Any:
        return args, {**named, "position_ids": torch.arange(IDS.shape[1])[None] + 5}

    body(model).register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("change", [wrap, replace, give_positions])
@pytest.mark.parametrize("since", [False, True])
def test_what_others_make_of_a_model_counts(change: Callable[[Any], None], since: bool) -> None:
    ours, theirs = both()
    if since:
        expect(ours, input_ids=IDS)
    for model in (ours, theirs):
        change(model)
    for model in () if since else (ours, theirs):
        results(model)
        model.zero_grad()
    if not since:
        expect(ours, input_ids=IDS)
    check(ours, theirs, IDS)


def test_tokens_on_another_device_are_left_alone(replays: list[int]) -> None:
    ours, _ = both()
    before = len(replays)
    expect(ours, input_ids=IDS.to("meta"))
    assert len(replays) == before


def test_a_pass_that_is_taken_for_another_is_not_begun_for_ever(replays: list[int]) -> None:
    """Over the same tokens, but without adapters: as trainers do that compare with the model as it was."""
    ours, theirs = both()
    before = len(replays)
    for _ in range(5):
        expect(ours, input_ids=IDS)
        theirs.zero_grad()
        with torch.no_grad(), ours.disable_adapter():
            ours(input_ids=IDS)
        check(ours, theirs, IDS)
    assert len(replays) <= before + 5 + subject.MOST_MISSES


def test_what_goes_wrong_is_said_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = both()
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


def test_recordings_are_given_up_with_the_layers() -> None:
    ours, _ = both()
    expect(ours, input_ids=IDS)
    graphs = weakref.ref(body(ours).layers[0].fused_parts.graphs)
    ours.early = record_passes(ours)
    gc.collect()
    assert graphs() is None


def test_copies_begin_nothing(replays: list[int]) -> None:
    ours, theirs = both()
    expect(ours, input_ids=IDS)
    other = copy.deepcopy(ours)
    assert other.early is None
    assert pickle.loads(pickle.dumps(ours.early)) is None
    check(other, theirs, IDS)
    check(ours, theirs, IDS)
