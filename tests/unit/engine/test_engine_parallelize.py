"""What spreading a model decides from the settings alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pantheraml.engine.parallelize import shared_batch_norm, static_graph_allowed
from pantheraml.parallel.process_group import World
from pantheraml.specs.multi_gpu import MultiGPUConfig


@pytest.mark.parametrize(
    ("wanted", "device", "kind"),
    [
        (True, "cuda", nn.SyncBatchNorm),
        (False, "cuda", nn.BatchNorm1d),
        (True, "cpu", nn.BatchNorm1d),
    ],
)
def test_batch_norm_is_shared_if_it_is_wanted_and_possible(wanted: bool, device: str, kind: type) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made = shared_batch_norm(model, World(rank=0, size=2, device=torch.device(device)), MultiGPUConfig(sync_bn=wanted))
    assert isinstance(made, nn.Sequential)
    assert type(made[1]) is kind


def test_a_variable_forbids_the_static_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", raising=False)
    assert static_graph_allowed(MultiGPUConfig())
    assert not static_graph_allowed(MultiGPUConfig(static_graph=False))
    monkeypatch.setenv("UNSLOTH_DISABLE_DDP_STATIC_GRAPH", "1")
    assert not static_graph_allowed(MultiGPUConfig())
