"""LLaMA-Factory's configs: each case is a config as people write it, and what must come out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pantheraml.base.errors import ConfigError
from pantheraml.specs.import_config.convert import Conversion, convert_file

BASE: dict[str, Any] = {
    "model_name_or_path": "org/small-1b",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "talks",
    "template": "default",
    "output_dir": "saves/one",
}
INFO = {
    "talks": {
        "file_name": "talks.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "tasks": {"file_name": "tasks.json"},
    "pairs": {"file_name": "pairs.jsonl", "columns": {"prompt": "prompt", "response": "completion"}},
    "renamed": {"file_name": "tasks.json", "columns": {"prompt": "question", "response": "answer"}},
    "human": {"file_name": "talks.json", "formatting": "sharegpt"},
    "pictures": {"file_name": "talks.json", "columns": {"images": "images"}},
    "far": {"hf_hub_url": "org/far", "subset": "en"},
    "absent": {"file_name": "absent.json"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `data/dataset_info.json`."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(INFO))
    for name in ("talks.json", "tasks.json", "pairs.jsonl"):
        (tmp_path / "data" / name).write_text("[]")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(folder: Path, values: dict[str, Any]) -> Conversion:
    file = folder / "factory.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    conversion = convert_file(file)
    told = {e.key for e in (*conversion.translated, *conversion.not_needed, *conversion.not_supported)}
    assert told >= values.keys(), "every key of the source is in a list"
    return conversion


def ours(conversion: Conversion) -> dict[str, Any]:
    sections = yaml.safe_load(conversion.text)
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def reasons(entries: list[Any]) -> dict[str, str]:
    return {entry.key: entry.reason for entry in entries}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults that differ from ours": (
        {},
        {
            "method.kind": "lora",
            "method.rank": 8,
            "method.alpha": 16,
            "method.target_modules": "all-linear",
            "model.precision": "fp32",
            "data.packing": False,
            "data.seq_len": 2048,
            "train.epochs": 3,
            "train.learning_rate": 5e-5,
            "train.schedule": "linear",
            "train.global_batch_size": 8,
            "train.seed": 42,
            "train.activation_checkpointing": "full",
            "checkpoint.every_steps": 500,
        },
    ),
    "lora": (
        {"lora_rank": 16, "lora_alpha": 8, "lora_dropout": 0.05, "lora_target": "q_proj, v_proj", "bf16": True},
        {
            "method.rank": 16,
            "method.alpha": 8,
            "method.dropout": 0.05,
            "method.target_modules": ["q_proj", "v_proj"],
            "model.precision": "bf16",
        },
    ),
    "qlora": ({"quantization_bit": 4, "quantization_method": "bnb", "bf16": True}, {"method.kind": "qlora"}),
    "8-bit base": ({"quantization_bit": 8}, {"method.kind": "lora", "model.precision": "int8"}),
    "dora, rslora": ({"use_dora": True, "use_rslora": True}, {"method.kind": "dora", "method.rslora": True}),
    "full": ({"finetuning_type": "full", "bf16": True}, {"method.kind": "full", "model.precision": "bf16"}),
    "pure bf16": ({"finetuning_type": "full", "pure_bf16": True}, {"train.weights": "bf16"}),
    "batch": (
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5},
        {"train.micro_batch_size": 3, "train.global_batch_size": 15},
    ),
    "steps": (
        {"max_steps": 250, "warmup_ratio": 0.05, "save_steps": 100, "logging_steps": 10, "num_train_epochs": 3.0},
        {
            "train.max_steps": 250,
            "train.warmup_steps": 13,
            "checkpoint.every_steps": 100,
            "train.log_every_steps": 10,
        },
    ),
    "lowest rate": (
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 2.5e-5}, "learning_rate": 1e-4},
        {"train.schedule": "cosine", "train.min_learning_rate_ratio": 0.25},
    ),
    "evaluation": (
        {"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 50, "per_device_eval_batch_size": 1},
        {"data.eval_fraction": 0.1, "train.eval_every_steps": 50},
    ),
    "evaluation file": ({"eval_dataset": "talks"}, {"data.eval_path": "data/talks.json"}),
    "lengths": (
        {"cutoff_len": 4096, "packing": True, "neat_packing": True, "preprocessing_num_workers": 4},
        {"data.seq_len": 4096, "data.packing": True, "data.workers": 4},
    ),
    "no checkpointing": ({"disable_gradient_checkpointing": True}, {"train.activation_checkpointing": "none"}),
    "trackers": ({"report_to": ["wandb", "tensorboard"]}, {"report.sinks": ["tensorboard", "wandb"]}),
    "chat file": ({}, {"data.path": "data/talks.json", "data.format": "messages"}),
    "pairs": ({"dataset": "pairs"}, {"data.path": "data/pairs.jsonl", "data.format": "prompt"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_becomes_ours(name: str, folder: Path) -> None:
    extra, expected = CASES[name]
    conversion = imported(folder, {**BASE, **extra})
    found = ours(conversion)
    assert {key: found.get(key) for key in expected} == expected
    assert reasons(conversion.not_supported).keys() == {"template"}
    assert "train.weights" not in found or name == "pure bf16"


@pytest.mark.parametrize(
    ("extra", "key", "advice"),
    [
        ({"template": "llama3"}, "template", "not llama3"),
        ({"template": "llama3", "dataset": "tasks"}, "template", "`### Instruction:`"),
        ({"dataset": "talks,tasks"}, "dataset", "data/combined, after you have brought them to the same columns"),
        ({"dataset": "far"}, "dataset", "load_dataset('org/far', 'en', split='train')"),
        ({"dataset": "human"}, "dataset.human.formatting", "column `messages`"),
        ({"dataset": "renamed"}, "dataset.renamed.columns", "`question` to `instruction`, `answer` to `output`"),
        ({"dataset": "pictures"}, "dataset.pictures.columns", "trains on text"),
        ({"dataset": "absent"}, "dataset.absent", "no file data/absent.json"),
        ({"dataset_dir": "elsewhere"}, "dataset_dir", "no elsewhere/dataset_info.json"),
        ({"dataset_dir": "REMOTE:org/rows"}, "dataset_dir", "hub"),
        ({"max_samples": 1000}, "max_samples", "cut the file"),
        ({"warmup_ratio": 0.1}, "warmup_ratio", "train.warmup_steps to 0.1 x"),
        ({"deepspeed": "ds_z3.json"}, "deepspeed", "parallel.shard"),
        ({"use_galore": True}, "use_galore", "not a way to train"),
        ({"report_to": ["wandb", "neptune"]}, "report_to", "neptune"),
        ({"quantization_bit": 4, "use_dora": True}, "use_dora", "4-bit"),
        ({"quantization_bit": 3}, "quantization_bit", "3 bits"),
        ({"optim": "adafactor"}, "optim", "adafactor"),
        ({"eval_strategy": "epoch", "val_size": 0.1}, "eval_strategy", "steps per epoch"),
        ({"cutof_len": 5}, "cutof_len", "did you mean `cutoff_len`"),
    ],
)
def test_what_is_not_supported_is_told_with_advice(extra: Any, key: str, advice: str, folder: Path) -> None:
    assert advice in reasons(imported(folder, {**BASE, **extra}).not_supported)[key]


def test_the_data_is_also_found_beside_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    assert ours(imported(folder, BASE))["data.path"] == str(folder / "data/talks.json")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"stage": "dpo"}, "`stage` is dpo"),
        ({"finetuning_type": "freeze"}, "lora and full"),
        ({"do_train": False}, "`do_train` is not true"),
        ({"do_train": None}, "`do_train` is not true"),
        ({"do_train": None, "export_dir": "merged"}, "exports a model"),
        ({"dataset": "unlisted"}, "It has: absent, far, human"),
        ({"dataset": ""}, "names no training data"),
        ({"dataset": 5}, "names, separated by commas"),
        ({"cutoff_len": "long"}, "takes a number"),
        ({"gradient_accumulation_steps": 0}, "`train.global_batch_size` = 0"),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused(extra: Any, words: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(folder, {**BASE, **extra})
    assert words in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, '"' + "x" * (1 << 20) + '"'])
def test_a_broken_dataset_info_is_an_error(content: str, folder: Path) -> None:
    (folder / "data/dataset_info.json").write_text(content)
    with pytest.raises(ConfigError, match=r"dataset_info\.json"):
        imported(folder, BASE)
