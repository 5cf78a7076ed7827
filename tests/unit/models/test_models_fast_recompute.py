"""Fused layers of families other than Llama under activation checkpointing."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.adapters import trainable_parameters
from pantheraml.specs.train import Checkpointing
from tests.unit.models.test_models_fast import IDS, LAYERS, adapted, assert_same, base_model, fused, results


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "granite"])
def test_checkpointing_is_bitwise_equal_for_other_layers(family: str, mode: Checkpointing) -> None:
    ours = fused(adapted(base_model(family)))
    expected = results(ours)
    assert apply_checkpointing(ours, mode) == LAYERS
    assert_same(results(ours), expected, tolerance=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_recomputed_layers_run_as_in_their_own_forward(family: str) -> None:
    """Although the reference model ran in between, unfused: also where layers have a RoPE table of their own."""
    ours = fused(adapted(base_model(family)))
    expected = results(ours)
    apply_checkpointing(ours, "full")
    ours.zero_grad()
    loss = ours(input_ids=IDS, labels=IDS, use_cache=False).loss
    with torch.no_grad(), ours.disable_adapter():
        ours(input_ids=IDS, use_cache=False)
    loss.backward()
    for name, parameter in trainable_parameters(ours):
        assert torch.equal(cast("Tensor", parameter.grad), expected[name]), name
