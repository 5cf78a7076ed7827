"""What spreading a model decides from the settings alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pantheraml.engine.parallelize import shared_batch_norm
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
