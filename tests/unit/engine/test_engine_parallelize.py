"""What spreading a model decides from the settings and the model, and says of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pantheraml.engine.parallelize import Traits, shared_batch_norm, static_graph_allowed, with_ddp
from pantheraml.parallel.process_group import World
from pantheraml.specs.multi_gpu import MultiGPUConfig


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("wanted", "device", "kind"),
    [
        (True, "cuda", nn.SyncBatchNorm),
        (False, "cuda", nn.BatchNorm1d),
        (True, "cpu", nn.BatchNorm1d),
    ],
)
def test_batch_norm_is_shared_if_it_is_wanted_and_possible(wanted: bool, device: str, kind: type) -> None:
    world = World(rank=0, size=2, device=torch.device(device))
    made, decided = shared_batch_norm(with_batch_norm(), world, MultiGPUConfig(sync_bn=wanted))
    assert isinstance(made, nn.Sequential)
    assert type(made[1]) is kind
    (choice,) = decided.choices
    assert (choice.name, choice.value) == ("parallel.sync_bn", kind is nn.SyncBatchNorm)
    assert choice.automatic is wanted
    if wanted and device == "cpu":
        (warning,) = decided.warnings
        assert "batch norm over its own samples (torch synchronises batch norm between GPUs only)" in warning
    else:
        assert not decided.warnings


def test_a_model_without_batch_norm_is_not_spoken_of() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    _, decided = shared_batch_norm(model, World(rank=0, size=2, device=torch.device("cpu")), MultiGPUConfig())
    assert not decided.choices
    assert not decided.warnings


@pytest.mark.parametrize(
    ("traits", "settings", "reason", "automatic"),
    [
        (Traits(), {}, "no reentrant checkpointing", True),
        (Traits(compiled=True), {}, "compiled layers", True),
        (Traits(), {"static_graph": False}, "parallel.static_graph is off", False),
    ],
)
def test_the_static_graph_is_decided_with_a_reason(
    traits: Traits, settings: dict[str, bool], reason: str, automatic: bool
) -> None:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    _, decided = with_ddp(with_batch_norm(), world, MultiGPUConfig(**settings), traits)
    graph, norm = decided.choices
    assert (graph.name, graph.value, graph.automatic) == ("parallel.static_graph", False, automatic)
    assert reason in graph.reason
    assert norm.name == "parallel.sync_bn"


def test_a_variable_forbids_the_static_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", raising=False)
    assert static_graph_allowed(MultiGPUConfig())
    assert not static_graph_allowed(MultiGPUConfig(static_graph=False))
    monkeypatch.setenv("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", "1")
    assert not static_graph_allowed(MultiGPUConfig())
