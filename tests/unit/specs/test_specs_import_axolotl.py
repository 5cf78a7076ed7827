"""Axolotl's configs: each case is a config as people write it, and what must come out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pantheraml.base.errors import ConfigError
from pantheraml.specs.import_config.convert import Conversion, convert_file

BASE: dict[str, Any] = {
    "base_model": "org/small-1b",
    "datasets": [{"path": "rows/train.jsonl", "type": "alpaca"}],
    "sequence_len": 1024,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "num_epochs": 2,
    "learning_rate": "3e-5",
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "output_dir": "./out",
}
LORA = {"adapter": "lora", "lora_r": 32, "lora_alpha": 64, "lora_dropout": 0.1}


def imported(tmp_path: Path, values: dict[str, Any]) -> Conversion:
    file = tmp_path / "axolotl.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    conversion = convert_file(file)
    told = {e.key for e in (*conversion.translated, *conversion.not_needed, *conversion.not_supported)}
    assert told >= values.keys(), "every key of the source is in a list"
    return conversion


def ours(conversion: Conversion) -> dict[str, Any]:
    """Every key of the written file, flat."""
    sections = yaml.safe_load(conversion.text)
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def reasons(entries: list[Any]) -> dict[str, str]:
    return {entry.key: entry.reason for entry in entries}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full fine-tune": (
        {"bf16": True, "weight_decay": 0.01, "max_grad_norm": 0.5},
        {
            "method.kind": "full",
            "model.precision": "bf16",
            "train.weights": "bf16",
            "train.global_batch_size": 16,
            "train.micro_batch_size": 2,
            "train.epochs": 2,
            "train.learning_rate": 3e-5,
            "train.weight_decay": 0.01,
            "train.max_grad_norm": 0.5,
            "train.seed": 42,
            "data.path": "rows/train.jsonl",
            "data.format": "instruction",
            "data.seq_len": 1024,
            "data.packing": False,
        },
    ),
    "lora": (
        {
            **LORA,
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_target_parameters": ["mlp.experts.down_proj"],
            "sample_packing": True,
            "seed": 7,
        },
        {
            "method.kind": "lora",
            "method.rank": 32,
            "method.alpha": 64,
            "method.dropout": 0.1,
            "method.target_modules": ["q_proj", "v_proj"],
            "method.target_parameters": ["mlp.experts.down_proj"],
            "data.packing": True,
            "train.seed": 7,
        },
    ),
    "qlora": (
        {**LORA, "adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True, "optimizer": "paged_adamw_8bit"},
        {"method.kind": "qlora", "method.target_modules": "all-linear", "train.optimizer": "adamw8bit"},
    ),
    "8-bit base": (
        {**LORA, "load_in_8bit": True, "bf16": True, "optimizer": "adamw_bnb_8bit"},
        {"method.kind": "lora", "model.precision": "int8", "train.optimizer": "adamw8bit"},
    ),
    "dora, rslora": (
        {**LORA, "peft_use_dora": True, "peft_use_rslora": True},
        {"method.kind": "dora", "method.rslora": True},
    ),
    "fp16": ({**LORA, "bf16": False, "fp16": True}, {"model.precision": "fp16"}),
    "fp32": ({**LORA, "bf16": False, "tf32": True}, {"model.precision": "fp32"}),
    "steps": (
        {"max_steps": 250, "warmup_ratio": 0.05, "save_steps": 0.2, "save_total_limit": 3, "logging_steps": 5},
        {
            "train.max_steps": 250,
            "train.warmup_steps": 12,
            "checkpoint.every_steps": 50,
            "checkpoint.keep": 3,
            "train.log_every_steps": 5,
        },
    ),
    "warmup steps and schedule": (
        {"lr_scheduler": "constant_with_warmup", "warmup_steps": 20, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
        {"train.schedule": "constant", "train.warmup_steps": 20, "train.beta2": 0.95, "train.eps": 1e-6},
    ),
    "evaluation": (
        {
            "val_set_size": 0.05,
            "eval_steps": 40,
            "early_stopping_patience": 3,
            "load_best_model_at_end": True,
            "cosine_min_lr_ratio": 0.1,
        },
        {
            "data.eval_fraction": 0.05,
            "train.eval_every_steps": 40,
            "train.early_stopping_patience": 3,
            "checkpoint.final": "best",
            "train.min_learning_rate_ratio": 0.1,
        },
    ),
    "chat data": (
        {"datasets": [{"path": "./rows.jsonl", "type": "chat_template", "roles_to_train": ["assistant"]}]},
        {"data.path": "./rows.jsonl", "data.format": "messages"},
    ),
    "text data through a loader": (
        {"datasets": [{"path": "json", "data_files": "rows/text.json", "type": "completion"}]},
        {"data.path": "rows/text.json", "data.format": "text"},
    ),
    "evaluation file": (
        {"test_datasets": [{"path": "rows/test.jsonl", "type": "alpaca", "split": "train"}]},
        {"data.eval_path": "rows/test.jsonl"},
    ),
    "older batch size": (
        {"batch_size": 12, "gradient_accumulation_steps": None},
        {"train.micro_batch_size": 2, "train.global_batch_size": 12},
    ),
    "known number of GPUs": (
        {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2, "fsdp_version": 2, "bf16": True,
         "fsdp_config": {"offload_params": False}},
        {"parallel.shard": 4, "parallel.replicate": 2, "parallel.tensor": 2, "train.global_batch_size": 128},
    ),
    "offloaded checkpointing": (
        {"gradient_checkpointing": True, "activation_offloading": True},
        {"train.activation_checkpointing": "offload"},
    ),
    "trackers": (
        {"wandb_project": "p", "use_tensorboard": True, "mlflow_experiment_name": "p"},
        {"report.sinks": ["wandb", "mlflow", "tensorboard"], "report.project": "p"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_config_becomes_ours(name: str, tmp_path: Path) -> None:
    extra, expected = CASES[name]
    conversion = imported(tmp_path, {**BASE, **extra})
    found = ours(conversion)
    assert {key: found.get(key) for key in expected} == expected
    assert conversion.not_supported == [] or name == "fp32"
    assert all("#" in line for line in conversion.text.splitlines() if line.startswith("  ")), (
        "every line has an origin"
    )


def test_sharded_full_fine_tunes_keep_fp32_weights(tmp_path: Path) -> None:
    assert "train.weights" not in ours(imported(tmp_path, {**BASE, "bf16": True, "fsdp": ["full_shard"]}))


def test_an_unknown_number_of_gpus_is_told(tmp_path: Path) -> None:
    conversion = imported(tmp_path, {**BASE, "deepspeed": "deepspeed_configs/zero3.json"})
    assert any("16 x N" in note for note in conversion.notes)
    assert "parallel.shard" in reasons(conversion.not_supported)["deepspeed"]
    assert not any(key.startswith("parallel.") for key in ours(conversion))


@pytest.mark.parametrize(
    ("extra", "key", "advice"),
    [
        ({"warmup_ratio": 0.1}, "warmup_ratio", "train.warmup_steps to 0.1 x"),
        ({"warmup_steps": 0.1}, "warmup_steps", "train.warmup_steps to 0.1 x"),
        ({"saves_per_epoch": 2}, "saves_per_epoch", "(steps per epoch) / 2"),
        ({"val_set_size": 200}, "val_set_size", "number of rows"),
        ({"optimizer": "lion_8bit"}, "optimizer", "lion_8bit"),
        ({"lr_scheduler": "rex"}, "lr_scheduler", "rex"),
        ({**LORA, "lora_target_modules": "model.layers.[\\d]+.mlp"}, "lora_target_modules", "regular expressions"),
        ({**LORA, "peft_use_dora": True, "load_in_8bit": True}, "load_in_8bit", "dora"),
        ({"load_in_4bit": True}, "load_in_4bit", "without an adapter"),
        ({"train_on_inputs": True}, "train_on_inputs", "answers only"),
        ({"special_tokens": {"pad_token": "<p>", "eos_token": "<e>"}}, "special_tokens", "eos_token"),
        ({"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "plugins", "SpectrumPlugin"),
        ({"bf16": False, "tf32": True}, "tf32", "full precision"),
        ({"datasets": [{"path": "org/rows", "name": "en", "type": "alpaca"}]}, "datasets",
         "datasets.load_dataset('org/rows', 'en', split='train').save_to_disk(\"data/rows\")"),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca"}, {"path": "b.jsonl", "type": "alpaca"}]}, "datasets",
         "data/combined"),
        ({"datasets": [{"path": "a.jsonl", "type": "sharegpt"}]}, "datasets.0.type", "docs/data.md"),
        ({"datasets": [{"path": "a.jsonl", "type": "chat_template", "field_messages": "conversations"}]},
         "datasets.0.field_messages", "rename the column `conversations`"),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca", "shards": 10}]}, "datasets.0.shards", "as a whole"),
        ({"datasets": [{"path": "a.jsonl", "type": "alpaca", "typo": 1}]}, "datasets.0.typo", "not known"),
        ({"excess_length_strategy": "drop"}, "excess_length_strategy", "truncated"),
        ({"squence_len": 5}, "squence_len", "did you mean `sequence_len`"),
        ({"early_stopping_patience": 3}, "early_stopping_patience", "evaluation data"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_told_with_advice(extra: Any, key: str, advice: str, tmp_path: Path) -> None:
    assert advice in reasons(imported(tmp_path, {**BASE, **extra}).not_supported)[key]


def test_switches_that_are_off_need_nothing(tmp_path: Path) -> None:
    off: dict[str, Any] = {
        "gptq": False,
        "wandb_entity": None,
        "relora": False,
        "load_in_8bit": False,
        "fsdp": [],
        "deepspeed": None,
        "evals_per_epoch": 4,
        "saves_per_epoch": 0,
        "special_tokens": {"pad_token": "<p>"},
    }
    conversion = imported(tmp_path, {**BASE, **off})
    assert conversion.not_supported == []
    assert off.keys() <= reasons(conversion.not_needed).keys()


def test_a_constant_schedule_has_no_warmup(tmp_path: Path) -> None:
    conversion = imported(tmp_path, {**BASE, "lr_scheduler": "constant", "warmup_steps": 10})
    assert "train.warmup_steps" not in ours(conversion)
    assert "no warmup" in reasons(conversion.not_needed)["warmup_steps"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"rl": "dpo"}, "another kind of training: dpo"),
        ({"reward_model": True}, "another kind of training"),
        ({"adapter": "llama-adapter"}, "lora, qlora and no adapter"),
        ({"adapter": "qlora", "load_in_4bit": False}, "needs 4 bits"),
        ({"model_type": "AutoModelForSequenceClassification"}, "classifier"),
        ({"learning_rate": "fast"}, "`learning_rate` takes a number, not fast"),
        ({"micro_batch_size": 1.5}, "whole number"),
        ({"sample_packing": "sometimes"}, "true or false"),
        ({"datasets": "rows"}, "takes a list"),
        ({"plugins": 3}, "takes a list"),
        ({"datasets": []}, "names no training data"),
        ({"datasets": [{"type": "alpaca"}]}, "no `path`"),
        ({"warmup_ratio": 3}, "fraction of the steps"),
        ({"sequence_len": 4}, "`data.seq_len` = 4"),
        ({**LORA, "lora_r": 0}, "from lora_r"),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused(extra: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        imported(tmp_path, {**BASE, **extra})
    assert "axolotl.yaml" in str(caught.value)
    assert words in str(caught.value)
