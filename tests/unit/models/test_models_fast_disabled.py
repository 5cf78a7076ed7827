"""Passes with disabled adapters, as DPO, KTO and GRPO make for their reference: fused, frozen weights alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pantheraml.engine.memory.checkpointing import apply_checkpointing
from pantheraml.models.fast import fuse
from pantheraml.models.quantize.quantized_linear import quantize_linears
from tests.unit.models.test_models_fast import (
    CPU,
    EXACT,
    FUSED,
    IDS,
    LAYERS,
    adapted,
    assert_same,
    base_model,
    logits,
    pair,
    relative_error,
    results,
    runs_fused,
)

FORMATS = {"dense": ("", 1), "fp8": ("fp8", 1), "fp8 in two layouts": ("fp8", 2), "nf4": ("nf4", 1)}


def fused_over(name: str) -> Any:
    kind, layouts = FORMATS[name]
    base = base_model("llama", hidden_size=64, intermediate_size=64)
    if kind:
        quantize_linears(base, kind, dtype=torch.float32, device=CPU)
    model = adapted(base)
    assert fuse(model, layouts=layouts).fused == LAYERS
    return model


def without_adapters(model: Any) -> Tensor:
    logits(model)  # the adapters' values are where the matmuls read them
    with model.disable_adapter():
        assert runs_fused(model)
        return logits(model)


@pytest.mark.parametrize("family", FUSED)
def test_logits_are_those_of_the_plain_layers(family: str) -> None:
    ours, theirs = pair(family)
    with theirs.disable_adapter():
        expected = logits(theirs)
    assert relative_error(without_adapters(ours), expected) <= EXACT
    assert relative_error(logits(ours), expected) > 0.1
    assert relative_error(logits(ours), logits(theirs)) <= EXACT


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_adapters_that_add_nothing(name: str) -> None:
    """Also over quantized weights: policy and reference round alike, and a new adapter starts where its model is."""
    model = fused_over(name)
    untrained = copy.deepcopy(model)
    for parameter_name, parameter in untrained.named_parameters():
        if "lora_B" in parameter_name:
            nn.init.zeros_(parameter)
    assert relative_error(without_adapters(model), logits(untrained)) <= 1e-6
    assert relative_error(logits(model), logits(untrained)) > 0.1


@pytest.mark.parametrize("mode", [None, "full", "selective"])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_of_an_earlier_pass_are_unchanged(name: str, mode: Any) -> None:
    model = fused_over(name)
    if mode is not None:
        assert apply_checkpointing(model, mode) == LAYERS
    expected = results(model)
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS, use_cache=False)
    without_adapters(model)
    out.loss.backward()
    assert_same({key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None},
                {key: value for key, value in expected.items() if key != "logits"}, tolerance=0)  # fmt: skip


def test_with_gradients_layers_run_unfused() -> None:
    ours, theirs = pair()
    collected = []
    for model in (ours, theirs):
        embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
        with model.disable_adapter():
            out = model(inputs_embeds=embedded, use_cache=False).logits
        out.square().mean().backward()
        assert embedded.grad is not None
        collected.append({"logits": out.detach(), "gradient": embedded.grad})
    assert_same(*collected)


def test_merged_adapters_are_part_of_the_weights() -> None:
    ours, theirs = pair()
    for model in (ours, theirs):
        model.merge_adapter()
    assert not runs_fused(ours)
    assert relative_error(logits(ours), logits(theirs)) <= EXACT
