"""Fp8 weights in two layouts through the worker: as planned, unless loaded weights turn out too large for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.models.fast import second_layouts
from pantheraml.parallel.process_group import World
from pantheraml.planner.choose import choose
from pantheraml.specs.plan import DeviceSpec, Plan
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.harness import make_run, train_here, values

HERE = DeviceSpec(gpus=(), cpu_count=1, ram_bytes=1 << 30, driver=None)
LAYERS = 2


def planned(folder: Path, **train: Any) -> tuple[TrainConfig, Plan]:
    settings = {"global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "fused": "on"}
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(folder / "model"), "precision": "fp8"},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": 64, "cache_dir": str(folder / "cache")},
            "method": {"rank": 4},
            "train": {**settings, **train},
            "device": "cpu",
        }
    )
    # the fused layers compute in float32 on a CPU
    return config, choose(config, HERE).model_copy(update={"precision": "fp32"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("layouts")
    toy.write_llama(place / "model", hidden_size=64, intermediate_size=128)
    toy.write_jsonl(place / "data.jsonl", toy.arithmetic(60))
    return place


@pytest.mark.parametrize(
    ("train", "too_large", "layouts"),
    [
        ({}, None, 2),
        ({"activation_checkpointing": "full"}, None, 1),
        ({"fp8_layouts": 1}, None, 1),
        ({}, "they are large", 1),
        ({"fp8_layouts": 2}, "they are large", 2),
    ],
)
def test_layouts_are_those_of_the_plan_where_weights_are_small_enough(
    folder: Path, train: Any, too_large: str | None, layouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pantheraml.worker.train.why_one_layout", lambda _: too_large)
    events: list[dict[str, Any]] = []
    world = World(rank=0, size=1, device=torch.device("cpu"))
    config, plan = planned(folder, **train)
    model = build_model(config, plan, world, lambda event: events.append(event.model_dump()))
    assert len(second_layouts(model)) == (2 * LAYERS if layouts == 2 else 0)
    choices = [event for event in events if event["kind"] == "choice"]
    assert [(event["value"], event["reason"]) for event in choices] == (
        [(1, "they are large")] if plan.fp8_layouts > layouts else []
    )


def test_a_model_that_a_plan_does_not_fuse_has_one(folder: Path) -> None:
    config, plan = planned(folder)
    unfused = plan.model_copy(update={"fused": False})  # as `verify` does for modes that divide the model
    model = build_model(config, unfused, World(rank=0, size=1, device=torch.device("cpu")), lambda *_, **__: None)
    assert second_layouts(model) == []


def test_losses_are_the_same(folder: Path) -> None:
    losses = []
    for layouts in (1, 2):
        run = make_run(folder / str(layouts), *planned(folder, fp8_layouts=layouts))
        losses.append(values(train_here(run), "train.step", "loss"))
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
