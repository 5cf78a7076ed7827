"""What Hugging Face's trainers are to know about our models: frozen weights, the row length, one GPU per process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError, UnsupportedModelError
from pantheraml.hooks import trl
from tests import toy

CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
LONG = Dataset.from_dict({"text": ["1+2+3+4+5=" * 100]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return toy.write_llama(tmp_path_factory.mktemp("trainers") / "model", max_position_embeddings=4096)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Trainers write to the environment, and loading a model patches them."""
    before = dict(os.environ)
    yield
    trl.revert()
    os.environ.clear()
    os.environ.update(before)


def load(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), device_map="cpu", **arguments)


def sft(model: Any, tokenizer: Any, args: Any, **arguments: Any) -> SFTTrainer:
    return SFTTrainer(model, args, train_dataset=LONG, processing_class=tokenizer, **arguments)


def config(output: Path, **settings: Any) -> SFTConfig:
    return SFTConfig(output_dir=str(output), max_steps=1, **{**CPU, **settings})


def test_a_trainer_with_nothing_to_train_is_an_error(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load(folder)
    trainer = sft(model, tokenizer, config(tmp_path), eval_dataset=LONG)
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(ConfigError, match=r"(?s)nothing to train.*get_peft_model.*peft_config.*full_finetuning=True"):
        trainer.train()


@pytest.mark.parametrize("way", ["get_peft_model", "peft_config", "full_finetuning", "prompt tuning", "plain"])
def test_trainers_with_something_to_train(folder: Path, tmp_path: Path, way: str) -> None:
    model, tokenizer = load(folder, full_finetuning=way == "full_finetuning")
    peft_config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM") if way == "peft_config" else None
    if way == "get_peft_model":
        model = FastLanguageModel.get_peft_model(model, r=2)
    elif way == "prompt tuning":
        model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    elif way == "plain":
        model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = sft(model, tokenizer, config(tmp_path, max_length=16, learning_rate=0.1), peft_config=peft_config)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert any(not torch.equal(after[name], weight) for name, weight in before.items())


def row_length(trainer: SFTTrainer) -> int:
    return len(trainer.train_dataset[0]["input_ids"])


@pytest.mark.parametrize("length", [32, 1200])
@pytest.mark.parametrize("kind", ["SFTConfig", "TrainingArguments", "none"])
def test_max_seq_length_is_the_default_of_max_length(
    folder: Path, tmp_path: Path, kind: str, length: int, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = load(folder, max_seq_length=length, full_finetuning=True)
    settings = {"output_dir": str(tmp_path), **CPU}
    args = {"SFTConfig": SFTConfig(**settings), "TrainingArguments": TrainingArguments(**settings), "none": None}[kind]
    if args is None:  # its bf16=True would be rejected without a GPU
        monkeypatch.setattr(TrainingArguments, "_validate_args", lambda self: None)
    rows = Dataset.from_dict({"text": ["1+2+3+4+5=" * 300]})
    with caplog.at_level(logging.INFO, logger="pantheraml"):
        trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    assert row_length(trainer) == length
    assert trainer.args.max_length == length
    assert caplog.text.count(f"max_length is {length}, from max_seq_length") == 1


def test_max_length_of_the_config_takes_precedence(folder: Path, tmp_path: Path, caplog: Any) -> None:
    model, tokenizer = load(folder, max_seq_length=64, full_finetuning=True)
    assert row_length(sft(model, tokenizer, config(tmp_path, max_length=24))) == 24
    assert "truncated to SFTConfig's max_length=24, less than the model's max_seq_length=64" in caplog.text
    caplog.clear()
    assert row_length(sft(model, tokenizer, config(tmp_path, max_length=80))) == 80
    whole = row_length(sft(model, tokenizer, config(tmp_path, max_length=None)))
    assert whole > 200
    assert "max_seq_length" not in caplog.text


def test_a_config_made_before_our_loader_is_imported(folder: Path, tmp_path: Path, caplog: Any) -> None:
    trl.revert()
    early = config(tmp_path)
    model, tokenizer = load(folder, max_seq_length=4096, full_finetuning=True)
    sft(model, tokenizer, early)
    assert "max_length=1024, less than the model's max_seq_length=4096" in caplog.text


@pytest.mark.parametrize("which", ["no max_seq_length", "plain model"])
def test_otherwise_max_length_is_trl_s(folder: Path, tmp_path: Path, which: str) -> None:
    model, tokenizer = load(folder, max_seq_length=None if which == "no max_seq_length" else 64)
    if which == "plain model":
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert sft(model, tokenizer, config(tmp_path)).args.max_length == 1024


def two_gpus(args: TrainingArguments) -> TrainingArguments:
    assert args.n_gpu <= 1
    args._n_gpu = 2
    return args


@pytest.mark.seed("S2-003", "S2-009", "S2-081")
@pytest.mark.parametrize("adapters", [True, False])
def test_a_trainer_uses_one_of_two_gpus(folder: Path, tmp_path: Path, adapters: bool, caplog: Any) -> None:
    model, tokenizer = load(folder, full_finetuning=not adapters)
    model = FastLanguageModel.get_peft_model(model, r=2) if adapters else model
    args = two_gpus(config(tmp_path, per_device_train_batch_size=3, max_length=16))
    trainer = sft(model, tokenizer, args)
    assert trainer.args.n_gpu == 1
    assert trainer._train_batch_size == 3
    assert trainer._wrap_model(model) is model
    assert "one of 2 visible GPUs" in caplog.text
    assert "enable_multi_gpu=True" in caplog.text
    assert "torchrun --nproc-per-node 2" in caplog.text
    trainer.train()


def test_other_models_keep_data_parallel(folder: Path, tmp_path: Path, caplog: Any) -> None:
    load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    args = two_gpus(TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3, **CPU))
    trainer = Trainer(plain, args)
    assert (trainer.args.n_gpu, trainer._train_batch_size) == (2, 6)
    assert "visible GPUs" not in caplog.text


def test_data_parallel_replicas_are_refused(folder: Path) -> None:
    model, _ = load(folder)
    wrapped = FastLanguageModel.get_peft_model(model, r=2)
    with pytest.raises(UnsupportedModelError, match=r"(?s)DataParallel.*enable_multi_gpu=True"):
        for module in wrapped.modules():  # as nn.parallel.replicate does
            if not isinstance(module, nn.ModuleList):
                module._replicate_for_data_parallel()


def test_a_script_prints_automatic_choices(folder: Path) -> None:
    load = f"FastLanguageModel.from_pretrained({str(folder)!r}, device_map='cpu')"
    code = f"from pantheraml import FastLanguageModel; {load}; {load}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line = "pantheraml INFO: dtype is float32: CPUs are rarely faster in bf16"
    assert done.stderr.count(line) == 2, "one per load"


SCRIPT = """
import sys
from pantheraml import FastLanguageModel
assert not any(name.startswith("trl.") for name in sys.modules), "TRL is imported early"
from trl import ORPOConfig, ORPOTrainer, SFTConfig, SFTTrainer
settings = {"output_dir": "unused", "max_steps": 1, "report_to": [], "warmup_ratio": 0.5}
default, old = SFTConfig(**settings), SFTConfig(max_seq_length=48, **settings)
ORPOConfig(max_prompt_length=8, **settings)
model, tokenizer = FastLanguageModel.from_pretrained(sys.argv[1], max_seq_length=1200, device_map="cpu")
from datasets import Dataset
rows = Dataset.from_dict({"text": ["1+2+3+4+5=" * 300]})
for config in (default, old):
    trainer = SFTTrainer(model, config, train_dataset=rows, tokenizer=tokenizer)
    print(config.max_length, config.warmup_steps, len(trainer.train_dataset[0]["input_ids"]))
"""


@pytest.mark.extended
def test_a_script_that_imports_trl_and_makes_its_config_before_it_loads(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["1200 0.5 1200", "48 0.5 48"]
    for line in (
        "WARNING: trl.ORPOTrainer is in trl.experimental.orpo in this version",
        "WARNING: SFTConfig's max_seq_length is called max_length in this version",
        "WARNING: ORPOConfig: max_prompt_length has no effect",
    ):
        assert done.stderr.count(f"pantheraml {line}") == 1, line


def test_arguments_by_their_old_names(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As scripts for TRL before 0.13 pass them, with a config, with TrainingArguments, and with neither."""
    model, tokenizer = load(folder, max_seq_length=64)
    model = FastLanguageModel.get_peft_model(model, r=2)
    rows = Dataset.from_dict({"body": ["1+2+3+4+5=" * 100]})
    old = {"tokenizer": tokenizer, "dataset_text_field": "body", "max_seq_length": 32, "packing": False}
    plain = TrainingArguments(output_dir=str(tmp_path), max_steps=1, **CPU)
    with caplog.at_level(logging.WARNING, "pantheraml"):
        for args in (config(tmp_path), plain):
            trainer = SFTTrainer(model=model, args=args, train_dataset=rows, **old)
            assert trainer.processing_class is tokenizer
            assert trainer.args.max_length == 32
            assert len(trainer.train_dataset[0]["input_ids"]) == 32
    assert "processing_class" in caplog.text
    assert "dataset_text_field" in caplog.text
    trainer.train()


def test_config_fields_by_their_old_names(folder: Path, tmp_path: Path) -> None:
    load(folder)
    made = config(tmp_path, max_seq_length=48, warmup_ratio=0.25)
    assert (made.max_length, made.get_warmup_steps(100)) == (48, 25)
    with pytest.raises(ConfigError, match="max_seq_length and max_length, which disagree"):
        config(tmp_path, max_seq_length=48, max_length=50)
    with pytest.raises(ConfigError, match="warmup_ratio=1, which is not a fraction"):
        config(tmp_path, warmup_ratio=1.0)
    trl.revert()
    with pytest.raises(TypeError, match="max_seq_length"):
        config(tmp_path, max_seq_length=48)


def test_old_names_are_not_translated_for_other_models(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = load(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(TypeError, match="tokenizer"):
        SFTTrainer(model=plain, args=config(tmp_path), train_dataset=LONG, tokenizer=tokenizer)
