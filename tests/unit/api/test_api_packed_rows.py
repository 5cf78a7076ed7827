"""TRL's packing and padding-free batches with `FastLanguageModel`: the loss of each document alone, or an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.hooks import trl
from pantheraml.models.tiny_model import tiny_config
from tests import toy

TARGETS = {"mamba2": ["in_proj"]}
PACKED = [{"packing": True, "eval_packing": True}, {"padding_free": True, "max_length": None}]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    disable_progress_bar()
    before = dict(os.environ)  # trainers modify it
    yield
    os.environ.clear()
    os.environ.update(before)
    trl.revert()


def write_model(folder: Path, family: str) -> Path:
    small = tiny_config(AutoConfig.for_model(family))
    small.vocab_size, small.initializer_range = 320, 0.2
    small.bos_token_id = small.eos_token_id = small.pad_token_id = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(folder)
    toy.write_tokenizer(folder)
    return folder


def trainer(folder: Path, output: Path, **settings: Any) -> SFTTrainer:
    model: Any
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu")
    targets = TARGETS.get(model.config.model_type, ["q_proj"])
    if model.config.model_type == "gpt_oss":
        settings["router_aux_loss_coef"] = 0.0
    rows = toy.arithmetic(24)
    fixed = {"max_steps": 1, "max_length": 64, "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
    return SFTTrainer(
        model=FastLanguageModel.get_peft_model(model, r=4, target_modules=targets),
        args=SFTConfig(output_dir=str(output), save_strategy="no", **{**fixed, **settings}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.parametrize("settings", PACKED, ids=["packing", "padding_free"])
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_packing_is_rejected_for_unsupported_families(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    run = trainer(write_model(tmp_path / "model", family), tmp_path / "out", **settings)
    for use in (run.train, run.evaluate):
        with pytest.raises(UnsupportedModelError, match="different values for packed documents") as caught:
            use()
        assert "packing=False and padding_free=False" in str(caught.value)


def test_training_without_packing(tmp_path: Path) -> None:
    run = trainer(write_model(tmp_path / "model", "mamba2"), tmp_path / "out")
    run.train()
    assert run.state.global_step == 1


@pytest.mark.parametrize("settings", PACKED, ids=["packing", "padding_free"])
@pytest.mark.parametrize("family", ["gpt_oss", "opt"])
def test_packed_loss_matches_padded(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "model", family)
    # the mean is over batches, whose rows differ with packing: so put all rows in one batch
    one_batch = {"per_device_eval_batch_size": 24}
    packed = trainer(folder, tmp_path / "out", **settings, **one_batch).evaluate()["eval_loss"]
    padded = trainer(folder, tmp_path / "other", **one_batch).evaluate()["eval_loss"]
    assert packed == pytest.approx(padded, rel=1e-5)
    trainer(folder, tmp_path / "trained", **settings).train()
