"""Decisions that parallelize makes from settings and model, and how it reports them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pantheraml.engine.parallelize import Traits, static_graph_allowed, sync_batch_norm_layers, with_ddp
from pantheraml.parallel.process_group import World
from pantheraml.specs.multi_gpu import MultiGPUConfig


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.seed("C23", "S1-029")
@pytest.mark.parametrize(
    ("wanted", "device", "kind"),
    [
        (True, "cuda", nn.SyncBatchNorm),
        (False, "cuda", nn.BatchNorm1d),
        (True, "cpu", nn.BatchNorm1d),
    ],
)
def test_batch_norm_is_synchronized_if_requested_and_possible(wanted: bool, device: str, kind: type) -> None:
    world = World(rank=0, size=2, device=torch.device(device))
    made, decisions = sync_batch_norm_layers(with_batch_norm(), world, MultiGPUConfig(sync_bn=wanted))
    assert isinstance(made, nn.Sequential)
    assert type(made[1]) is kind
    (choice,) = decisions.choices
    assert (choice.name, choice.value) == ("parallel.sync_bn", kind is nn.SyncBatchNorm)
    assert choice.automatic is wanted
    if wanted and device == "cpu":
        (warning,) = decisions.warnings
        assert "batch norm is per rank, over its own samples (torch supports SyncBatchNorm on GPUs only)" in warning
    else:
        assert not decisions.warnings


def test_model_without_batch_norm_reports_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    _, decisions = sync_batch_norm_layers(model, World(rank=0, size=2, device=torch.device("cpu")), MultiGPUConfig())
    assert not decisions.choices
    assert not decisions.warnings


@pytest.mark.parametrize(
    ("traits", "settings", "reason", "automatic"),
    [
        (Traits(), {}, "without reentrant checkpointing", True),
        (Traits(compiled=True), {}, "compiled layers", True),
        (Traits(), {"static_graph": False}, "parallel.static_graph is off", False),
    ],
)
def test_static_graph_decision_has_a_reason(
    traits: Traits, settings: dict[str, bool], reason: str, automatic: bool
) -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    _, decisions = with_ddp(with_batch_norm(), world, MultiGPUConfig(**settings), traits)
    graph, norm = decisions.choices
    assert (graph.name, graph.value, graph.automatic) == ("parallel.static_graph", False, automatic)
    assert reason in graph.reason
    assert norm.name == "parallel.sync_bn"


@pytest.mark.seed("S2-032")
def test_environment_variable_disables_the_static_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", raising=False)
    assert static_graph_allowed(MultiGPUConfig())
    assert not static_graph_allowed(MultiGPUConfig(static_graph=False))
    monkeypatch.setenv("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", "1")
    assert not static_graph_allowed(MultiGPUConfig())
