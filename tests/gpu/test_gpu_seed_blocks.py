"""Code blocks of the product documents that print memory of GPUs or train on one; see tests/seed_blocks.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("trl")

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel, performance
from pantheraml.hooks import multi_gpu
from pantheraml.hooks import peft as peft_hooks
from pantheraml.hooks import trl as trl_hooks
from pantheraml.parallel.device_map import is_split
from tests import toy
from tests.seed_blocks import run

HOST_AND_GPU = {"": "cuda:0", "model.embed_tokens": "cpu", "model.layers.0": "cpu", "lm_head": "cpu"}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PANTHERAML_RELAUNCH", "0")
    yield
    multi_gpu.revert()
    trl_hooks.revert()
    peft_hooks.revert()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def optimizer() -> Iterator[performance.PerformanceOptimizer]:
    found = performance.create_performance_optimizer()
    found.wrap_model_for_multi_gpu(nn.Linear(256, 256).cuda())
    yield found
    found.cleanup()


def dataset() -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"], "completion": row["completion"]} for row in toy.arithmetic(16)])


@pytest.mark.seed("S1:264", "S1:292", "S1-100", "S1-101", "S1-102", "S1-103", "S1-009", "S1-010")
def test_memory_of_each_gpu_is_printed(
    optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("S1:264", optimizer=optimizer)
    out = capsys.readouterr().out
    assert f"Device Count: {torch.cuda.device_count()}\n" in out
    assert re.search(r"GPU 0: Allocated: [\d.]+MB, Free: [\d.]+MB", out)
    run("S1:292", optimizer=optimizer, num_steps=1)
    assert re.search(r"  GPU 0: [\d.]+MB", capsys.readouterr().out)


@pytest.mark.seed("S1:384", "S1-010", "S1-099", "S1-125")
def test_gpu_utilization_is_printed(
    optimizer: performance.PerformanceOptimizer, capsys: pytest.CaptureFixture[str]
) -> None:
    run("S1:384", optimizer=optimizer, config=optimizer.config)
    assert re.match(r"GPU utilization: \[\d+", capsys.readouterr().out)


@pytest.mark.seed("S2:46", "S0-084")
def test_single_process_training(tmp_path: Path) -> None:
    toy.write_llama(tmp_path / "unsloth/Llama-3.2-1B-Instruct", hidden_size=64)
    found = run("S2:46", dataset=dataset())
    assert found["trainer"].state.global_step == 2
    assert next(found["model"].parameters()).is_cuda


@pytest.mark.seed("S2-015", "S2-019")
@pytest.mark.parametrize("four_bit", [False, True])
def test_a_split_model_trains_with_sft_trainer(tmp_path: Path, four_bit: bool) -> None:
    """Over the host and one GPU, which are two devices, as two GPUs are."""
    folder = toy.write_llama(tmp_path / "model", hidden_size=64)
    losses = []
    for device_map in (HOST_AND_GPU, "cuda:0"):
        torch.manual_seed(0)
        model, tokenizer = FastLanguageModel.from_pretrained(
            str(folder), max_seq_length=128, load_in_4bit=four_bit, dtype=torch.float32, device_map=device_map
        )
        model = FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing="unsloth")
        assert is_split(model) == (device_map is HOST_AND_GPU)
        args = SFTConfig(
            "out", max_steps=3, learning_rate=1e-2, logging_steps=1, bf16=False, report_to=[], save_strategy="no"
        )
        trainer = SFTTrainer(model=model, processing_class=tokenizer, train_dataset=dataset(), args=args)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    split, whole = losses
    assert len(split) == 3
    assert split == pytest.approx(whole, rel=2e-2 if four_bit else 1e-3)
