"""QLoRA through the worker, fused: it learns as unfused QLoRA does, and an output head of its own is packed too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.fp8 import FP8Head
from pantheraml.parallel.process_group import World
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import build_model
from tests import toy
from tests.harness import make_plan, make_run, silent, train_here, values


def qlora(folder: Path, model: Path, *, fused: str) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": 64, "cache_dir": str(folder / "cache")},
            "method": {"kind": "qlora", "rank": 4},
            "train": {"global_batch_size": 4, "max_steps": 6, "learning_rate": 1e-2, "fused": fused},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("nf4")
    toy.write_llama(place / "own-head", hidden_size=64, intermediate_size=128)
    toy.write_llama(place / "shared-head", hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    toy.write_jsonl(place / "data.jsonl", toy.arithmetic(60))
    return place


def built(folder: Path, model: str, fused: str) -> Any:
    config = qlora(folder, folder / model, fused=fused)
    return build_model(config, make_plan(config), World(rank=0, size=1, device=torch.device("cpu")), silent)


@pytest.mark.parametrize(
    ("model", "fused", "head"),
    [("own-head", "on", FP8Head), ("own-head", "off", nn.Linear), ("shared-head", "on", nn.Linear)],
)
def test_the_head_is_packed_where_that_saves_memory(folder: Path, model: str, fused: str, head: type) -> None:
    whole = built(folder, model, fused)
    assert type(whole.get_base_model().get_output_embeddings()) is head
    assert sum(is_fused(layer) for layer in whole.modules()) == (2 if fused == "on" else 0)


def test_it_learns_as_it_does_unfused(folder: Path) -> None:
    losses = {}
    for fused in ("on", "off"):
        config = qlora(folder, folder / "own-head", fused=fused)
        run = make_run(folder / fused, config, make_plan(config))
        losses[fused] = values(train_here(run), "train.step", "loss")
        assert run.trained().is_dir()
    assert losses["on"][-1] < 0.97 * losses["on"][0]
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-2)
