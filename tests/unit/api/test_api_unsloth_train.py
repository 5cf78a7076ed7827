"""unsloth_train: a trainer or its parts, and clear errors before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel, unsloth_train
from pantheraml.base.errors import ConfigError
from tests import toy
from tests.unit.models.conftest import TinyModel

SHORT: dict[str, Any] = {"max_steps": 2, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def parts(tiny_model: TinyModel) -> dict[str, Any]:
    model, tokenizer = FastLanguageModel.from_pretrained(str(tiny_model("llama")), max_seq_length=64)
    model = FastLanguageModel.get_peft_model(model, r=2)
    return {"model": model, "tokenizer": tokenizer, "train_dataset": Dataset.from_list(toy.arithmetic(16))}


@pytest.mark.seed("S3-021")
def test_a_trainer_and_its_parts(parts: dict[str, Any], tmp_path: Path) -> None:
    by_parts = unsloth_train(**parts, output_dir=str(tmp_path), learning_rate=0.0, seed=1, **SHORT)
    parts["processing_class"] = parts.pop("tokenizer")
    args = SFTConfig(str(tmp_path), learning_rate=0.0, seed=1, **SHORT)
    trained = unsloth_train(SFTTrainer(**parts, args=args))
    assert by_parts.global_step == trained.global_step == 2
    assert by_parts.training_loss == pytest.approx(trained.training_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "unsloth_train needs model="),
        ({"train_dataset": None}, "unsloth_train needs train_dataset="),
        ({"max_stepz": 2}, "got max_stepz=, which neither SFTTrainer nor SFTConfig has"),
        ({"processing_class": "other"}, "got tokenizer and processing_class, which disagree"),
        ({"trainer": "model"}, "got a str as its trainer"),
    ],
)
def test_errors(parts: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        unsloth_train(**{**parts, **changes})
    with pytest.raises(ConfigError, match="got args= and max_steps=, which belongs in it"):
        unsloth_train(**parts, args=object(), max_steps=2)
