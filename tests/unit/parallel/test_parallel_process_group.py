"""`memory_fraction` limits what torch allocates, on each GPU of the process and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.parallel import process_group
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.plan import LayerSplit, Plan
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig
from tests.harness import make_plan

CONFIG = TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Any]]:
    found: list[tuple[float, Any]] = []
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append((share, device))
    )
    return found


def plan(**changes: Any) -> Plan:
    return make_plan(CONFIG, micro=1).model_copy(update={"device": "cuda", "device_ids": (4, 6), **changes})


@pytest.mark.seed("S4-019", "S4-139")
def test_a_rank_limits_its_own_gpu(limits: list[tuple[float, Any]]) -> None:
    device = torch.device("cuda", 1)
    process_group._limit_memory(plan(memory_fraction=0.5), device)
    process_group._limit_memory(plan(), device)
    assert limits == [(0.5, device)]


@pytest.mark.parametrize("change", [{"copies": True}, {"split": LayerSplit(device_map="balanced", max_memory=None)}])
def test_a_process_with_several_gpus_limits_all(limits: list[tuple[float, Any]], change: dict[str, Any]) -> None:
    process_group._limit_memory(plan(memory_fraction=0.25, **change), torch.device("cuda", 0))
    assert limits == [(0.25, 0), (0.25, 1)]


def test_it_is_set_before_anything_is_loaded(limits: list[tuple[float, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    one = plan(memory_fraction=0.75, device_ids=(2,))
    with open_world(one, timeout_seconds=5) as world:
        assert limits == [(0.75, world.device)]
    with open_world(one.model_copy(update={"device": "cpu"}), timeout_seconds=5):
        assert len(limits) == 1
