"""Fused layers that fail at their first use run unfused, with a line that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.fast import layers as fast_layers
from tests.unit.models.test_models_fast import EXACT, adapted, assert_same, base_model, fused, results, runs_fused

MESSAGE = "decoder layers run unfused: the first fused pass failed (RuntimeError: no kernel for this GPU)"


def failing(calls: int) -> Callable[..., Any]:
    """The MLP half of a layer, which fails from its call number `calls` on."""
    real, count = fast_layers.after_attention, [0]

    def run(*args: Any) -> Any:
        count[0] += 1
        if count[0] > calls:
            raise RuntimeError("no kernel for this GPU\nand more")
        return real(*args)

    return run


@pytest.mark.parametrize("working", [0, 1], ids=["first layer", "second layer"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_layer_that_fails_runs_unfused(
    working: int, checkpointing: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = adapted(base_model("llama"))
    ours, expected = fused(plain), results(plain)
    apply_checkpointing(ours, checkpointing)
    with monkeypatch.context() as patch, caplog.at_level("WARNING", logger="pantheraml"):
        # layers before the failing one are recomputed in backward, fused, as in their own forward
        patch.setattr(fast_layers, "after_attention", failing(working))
        logits = ours(input_ids=torch.zeros(1, 5, dtype=torch.long), use_cache=False).logits
    assert logits.isfinite().all()
    assert caplog.text.count(MESSAGE) == 1
    assert not runs_fused(ours)
    assert_same(results(ours), expected, EXACT)


def test_the_pass_that_fails_has_the_gradients_of_unfused_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = adapted(base_model("llama"))
    ours = fused(plain)
    monkeypatch.setattr(fast_layers, "after_attention", failing(1))
    assert_same(results(ours), results(plain))


def test_errors_of_the_unfused_layer_are_raised(caplog: pytest.LogCaptureFixture) -> None:
    ours = fused(adapted(base_model("llama")))
    twin = copy.deepcopy(ours)
    with pytest.raises(RuntimeError), caplog.at_level("WARNING", logger="pantheraml"):
        ours(inputs_embeds=torch.zeros(1, 5, 31), use_cache=False)
    assert "unfused" not in caplog.text
    assert runs_fused(ours)
    assert runs_fused(twin)


def test_running_out_of_memory_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fused(adapted(base_model("llama")))

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(fast_layers, "after_attention", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            results(ours)
    assert runs_fused(ours)


def test_a_later_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that have run fused are not switched in the middle of a run."""
    ours = fused(adapted(base_model("llama")))
    results(ours)
    monkeypatch.setattr(fast_layers, "after_attention", failing(0))
    with pytest.raises(RuntimeError, match="no kernel"):
        results(ours)
