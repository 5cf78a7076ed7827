"""Decoder layers that cannot be fused are left alone, with the reason; others of the model are fused."""

from __future__ import annotations

import copy
import importlib
import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from pantheraml.models.fast import fuse, is_fused
from pantheraml.models.fast.families import FAMILIES as FAMILY_TABLE
from pantheraml.models.fast.families import UNFUSED
from pantheraml.planner.facts import FUSED
from pantheraml.planner.facts import UNFUSED as PLANNED_UNFUSED
from tests.unit.models.test_models_fast import (
    EXACT,
    LAYERS,
    adapted,
    assert_same,
    base_model,
    fused,
    logits,
    relative_error,
    results,
    runs_fused,
)


def assert_left_alone(model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture, *, trains: bool = True) -> None:
    twin = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, logger="pantheraml"):
        report = fuse(model)
    assert report.fused == 0
    assert list(report.reasons.values()) == [LAYERS]
    assert reason in next(iter(report.reasons))
    assert reason in caplog.text
    assert not any(is_fused(module) for module in model.modules())
    if trains:
        torch.manual_seed(0)
        actual = results(model)
        torch.manual_seed(0)
        assert_same(actual, results(twin))  # norms run in one kernel, in another order


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_dropout": 0.1}, "dropout"),
        ({"r": 513}, "its adapter's rank is above 512"),
    ],
)
def test_adapters_that_cannot_be_fused(lora: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_left_alone(adapted(base_model("llama"), **lora), reason, caplog)


@pytest.mark.parametrize("family", ["gpt2", "cohere2"])
def test_unsupported_families(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = adapted(base_model(family), fan_in_fan_out=family == "gpt2")
    reason = {"gpt2": "is not a supported family", "cohere2": "side by side (Cohere2DecoderLayer)"}[family]
    assert_left_alone(model, reason, caplog)


def test_tables_name_classes_that_exist() -> None:
    assert not FAMILY_TABLE.keys() & UNFUSED.keys()
    for name in [*FAMILY_TABLE, *UNFUSED]:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), GradientCheckpointingLayer)
    fused_families = {name.split(".")[2] for name in FAMILY_TABLE}
    assert {name.removesuffix("_text") for name in FUSED} <= fused_families, "the planner knows which are fused"
    assert not fused_families & PLANNED_UNFUSED.keys()


def test_other_activations_sizes_and_trained_norms(caplog: pytest.LogCaptureFixture) -> None:
    assert_left_alone(adapted(base_model("llama", hidden_act="relu")), "neither SiLU nor GELU", caplog)
    assert_left_alone(adapted(base_model("llama", intermediate_size=40)), "multiple of 16", caplog)
    partial = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    assert_left_alone(adapted(base_model("phi3", rope_parameters=partial)), "a part of each head", caplog)
    model = adapted(base_model("llama"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or "layernorm" in name)
    assert_left_alone(model, "norms are trainable", caplog)


def test_dropout_counts_in_training_only() -> None:
    plain = adapted(base_model("llama"), lora_dropout=0.5).eval()
    ours = fused(plain)
    assert runs_fused(ours)
    assert relative_error(logits(ours), logits(plain)) <= EXACT
    ours.train()
    plain.train()
    assert not runs_fused(ours)
    torch.manual_seed(0)
    actual = results(ours)
    torch.manual_seed(0)
    assert_same(actual, results(plain))


def test_layers_are_fused_one_by_one() -> None:
    plain = adapted(
        base_model("llama"), targets=[f"model.layers.1.{name}" for name in ("self_attn.q_proj", "mlp.up_proj")]
    )
    ours = copy.deepcopy(plain)
    report = fuse(ours)
    assert report.fused == 1
    assert dict(report.reasons) == {"it has no adapter": 1}
    assert_same(results(ours), results(plain))


def test_an_adapter_with_a_bias_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted(base_model("qwen2"), targets=["q_proj"], lora_bias=True)
    assert_left_alone(model, "adapter has a bias", caplog)
