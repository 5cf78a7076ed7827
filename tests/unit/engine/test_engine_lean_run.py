"""Full runs on a CPU with bf16 weights, quantized optimizer states and activation checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pantheraml.base.errors import CheckpointError
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here, values

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lean")
    toy.write_llama(folder / "model", hidden_size=64, intermediate_size=128)
    toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(100))
    return folder


def run(root: Path, name: str, *, steps: int, **train: Any) -> RunDir:
    settings = {"global_batch_size": 4, "max_steps": steps, "learning_rate": 5e-3, "schedule": "constant"}
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model"), "precision": "bf16"},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "cache_dir": str(root / "cache")},
            "method": {"kind": "full"},
            "train": {**settings, **train},
        }
    )
    return make_run(root / name, config, make_plan(config, micro=2, precision="bf16"))


def weights(of: RunDir) -> dict[str, torch.Tensor]:
    return load_file(of.path / "model" / "model.safetensors")


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "adamw8bit"])
def test_bf16_weights_resume_bit_for_bit(root: Path, optimizer: str) -> None:
    lean: dict[str, Any] = {"weights": "bf16", "optimizer": optimizer, "activation_checkpointing": "offload"}
    straight = run(root, f"straight-{optimizer}", steps=6, **lean)
    losses = values(train_here(straight), "train.step", "loss")
    halves = run(root, f"halves-{optimizer}", steps=3, **lean)
    train_here(halves)
    config = halves.config()
    halves.write_config(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 6})}))
    assert values(train_here(halves), "train.step", "loss") == losses
    ours, theirs = weights(halves), weights(straight)
    assert all(weight.dtype == torch.bfloat16 for weight in ours.values())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_bf16_weights_learn_like_float32_ones(root: Path) -> None:
    wide = values(train_here(run(root, "wide", steps=20)), "train.step", "loss")
    lean: dict[str, Any] = {"weights": "bf16", "optimizer": "adamw8bit", "activation_checkpointing": "selective"}
    narrow = values(train_here(run(root, "narrow", steps=20, **lean)), "train.step", "loss")
    assert wide[-1] < 0.7 * wide[0]
    assert narrow[-1] == pytest.approx(wide[-1], rel=0.05)


def test_resume_with_other_weight_dtype_is_rejected(root: Path) -> None:
    changed = run(root, "changed", steps=2)
    train_here(changed)
    config = changed.config()
    train = config.train.model_copy(update={"weights": "bf16", "max_steps": 4})
    changed.write_config(config.model_copy(update={"train": train}))
    with pytest.raises(CheckpointError, match=r"train\.weights"):
        train_here(changed)
