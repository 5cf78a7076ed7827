"""Which runs leave the weights of decoder layers unread until the layers are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.models.lazy_weights import DEFERRED_WEIGHTS
from pantheraml.parallel.process_group import World
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.harness import make_plan, silent


@pytest.mark.parametrize("dims", [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"replicate": 2}, {"context": 2}, {}])
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_only_a_model_that_will_be_cut_is_read_later(tmp_path: Path, dims: dict[str, int], kind: str) -> None:
    toy.write_llama(tmp_path, num_hidden_layers=1)
    settings: dict[str, Any] = {"model": {"path": str(tmp_path)}, "data": {"path": "d"}, "method": {"kind": kind}}
    config = TrainConfig.model_validate(settings)
    plan = make_plan(config, dims=ParallelDims(**dims))
    model = build_model(config, plan, World(0, 1, torch.device("cpu")), silent)
    unread = any(DEFERRED_WEIGHTS in vars(module) for module in model.modules())
    assert unread == (kind != "dora" and bool(dims.keys() & {"shard", "tensor", "pipeline"}))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.isfinite().all(), "adapters begin with numbers of their own"
