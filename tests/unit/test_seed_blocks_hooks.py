"""Code blocks of the product documents about loading, hooks and MultiGPUTrainer, changed in their import lines alone.

The model names are folders beside the script, which hold tiny models. Where a block leaves something out, the test says
what it adds.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig
from torch.utils.data import DataLoader

from pantheraml.hooks import multi_gpu
from pantheraml.hooks import peft as peft_hooks
from pantheraml.hooks import trl as trl_hooks
from pantheraml.specs.multi_gpu import MultiGPUConfig
from tests import toy

NAMES = ("unsloth/llama-2-7b-bnb-4bit", "unsloth/Llama-3.2-1B-Instruct", "model_name")


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    root = tmp_path_factory.mktemp("seeds")
    first = toy.write_llama(root / NAMES[0], hidden_size=64)
    for name in NAMES[1:]:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).symlink_to(first)
    return root


@pytest.fixture(autouse=True)
def _as_it_was(playground: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.chdir(playground)
    monkeypatch.setenv("PANTHERAML_RELAUNCH", "0")
    yield
    multi_gpu.revert()
    trl_hooks.revert()
    peft_hooks.revert()
    os.environ.clear()
    os.environ.update(before)


def run(block: str, **names: Any) -> dict[str, Any]:
    exec(compile(textwrap.dedent(block), "block", "exec"), names)
    return names


def dataset() -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"], "completion": row["completion"]} for row in toy.arithmetic(16)])


@pytest.mark.seed("S0-053", "S0-054", "S0-055", "S0-056", "S0-057", "S0-058")
def test_s0_configuration() -> None:
    found = run(
        """
        from pantheraml import MultiGPUConfig
        config = MultiGPUConfig(
            backend="nccl",                    # Communication backend
            auto_device_map=True,              # Automatic device mapping
            use_gradient_checkpointing=True,   # Memory optimization
            find_unused_parameters=False,      # DDP configuration
        )
        """
    )
    assert isinstance(found["config"], MultiGPUConfig)


@pytest.mark.seed("S2-010", "S2-011", "S2-012", "S2-033")
def test_s2_function_parameter() -> None:
    """The document's second closing parenthesis is left out."""
    found = run(
        """
        from pantheraml import FastLanguageModel

        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name="unsloth/Llama-3.2-1B-Instruct",
            max_seq_length=2048,
            load_in_4bit=True,
            enable_multi_gpu=True,  # Enable multi-GPU support
            device_map="auto",      # Automatically distribute across GPUs (optional, auto-detected)
        )
        """
    )
    assert found["tokenizer"].model_max_length == 2048


@pytest.mark.seed("S2-015", "S2-016", "S2-017", "S2-018", "S2-019", "S2-020", "S2-021")
def test_s2_single_process_training() -> None:
    found = run(
        """
        from pantheraml import FastLanguageModel
        from trl import SFTTrainer, SFTConfig
        import torch

        # Load model with automatic GPU distribution
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name="unsloth/Llama-3.2-1B-Instruct",
            max_seq_length=2048,
            load_in_4bit=True,
            enable_multi_gpu=True,
            device_map="auto",  # Distribute model across available GPUs
        )

        # Setup LoRA
        model = FastLanguageModel.get_peft_model(
            model,
            r=16,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj",
                            "gate_proj", "up_proj", "down_proj"],
            lora_alpha=16,
            lora_dropout=0,
            bias="none",
            use_gradient_checkpointing="unsloth",
        )

        # Train with SFTTrainer (automatically gets DDP support when unsloth is imported)
        trainer = SFTTrainer(
            model=model,
            tokenizer=tokenizer,
            train_dataset=dataset,
            args=SFTConfig(
                per_device_train_batch_size=2,
                gradient_accumulation_steps=4,
                max_steps=MAX_STEPS,
                learning_rate=2e-4,
                output_dir="outputs",
            ),
        )

        trainer.train()
        """.replace("MAX_STEPS", "2"),  # 60 in the document
        dataset=dataset(),
    )
    assert found["trainer"].state.global_step == 2


@pytest.mark.seed("S2-063")
def test_s2_test_multi_gpu_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        """
        import os
        os.environ['UNSLOTH_ENABLE_MULTIGPU'] = '1'
        from pantheraml import get_multi_gpu_config
        print(get_multi_gpu_config())
        """
    )
    assert "'enabled': True" in capsys.readouterr().out


@pytest.mark.seed("S3-009", "S3-014", "S3-015", "S3-016", "S3-017", "S3-018", "S3-019", "S3-020", "S3-021", "S3-022")
def test_s3_method_1() -> None:
    """The other training parameters: an adapter, since 4-bit weights are frozen, and a short run."""
    found = run(
        """
        import pantheraml as unsloth_multigpu
        from pantheraml import FastLanguageModel, unsloth_train

        # 1. Enable multi-GPU support (Hook mechanism)
        unsloth_multigpu.enable_multi_gpu(
            num_gpus=4,  # Use 4 GPUs
            batch_size_per_gpu=8,  # Batch size per GPU
            gradient_aggregation="mean"  # Gradient aggregation strategy
        )

        # 2. Load model (multi-GPU supported automatically)
        model, tokenizer = FastLanguageModel.from_pretrained(
            "unsloth/llama-2-7b-bnb-4bit",  # Use 4bit quantized version
            max_seq_length=2048,
            dtype="bfloat16",
            load_in_4bit=True
        )

        # 3. Use native unsloth_train (internally hooked to multi-GPU logic)
        trainer_stats = unsloth_train(
            model=model,
            tokenizer=tokenizer,
            train_dataset=dataset,
            # ... other training parameters
            **others,
        )
        """,
        dataset=dataset(),
        others={"peft_config": LoraConfig(target_modules="all-linear"), "max_steps": 2, "output_dir": "outputs"},
    )
    assert found["trainer_stats"].global_step == 2
    assert found["trainer_stats"].training_loss > 0


@pytest.mark.seed("S3-023", "S3-024", "S3-025", "S3-026", "S3-027", "S3-028", "S3-039")
def test_s3_method_2() -> None:
    """The document trains the loaded model without adapters; here it gets them."""
    found = run(
        """
        from pantheraml import MultiGPUTrainer, AggregationMethod
        from pantheraml import FastLanguageModel
        import torch

        # 1. Load model
        model, tokenizer = FastLanguageModel.from_pretrained("model_name")
        model = FastLanguageModel.get_peft_model(model)

        # 2. Configure optimizer
        optimizer_config = {
            'class': torch.optim.AdamW,
            'kwargs': {'lr': 2e-5, 'weight_decay': 0.01}
        }

        # 3. Directly create multi-GPU trainer
        trainer = MultiGPUTrainer(
            model=model,
            num_gpus=4,
            optimizer_config=optimizer_config,
            aggregation_method=AggregationMethod.MEAN
        )

        # 4. Train
        trainer.setup()
        epoch_stats = trainer.train_epoch(dataloader)
        """,
        dataloader=DataLoader([{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(6)], 2),  # type: ignore[arg-type]
    )
    found["trainer"].cleanup()
    assert (found["epoch_stats"]["steps"], found["epoch_stats"]["samples"]) == (3, 6)


@pytest.mark.seed("S3-029", "S3-030", "S3-031", "S3-032", "S3-033", "S3-034", "S3-066", "S3-067")
def test_s3_advanced_configuration() -> None:
    found = run(
        """
        import pantheraml as unsloth_multigpu
        from pantheraml import ConfigManager, DeviceManager

        # 1. Device management
        device_manager = DeviceManager()
        devices = device_manager.get_available_devices()

        # 2. Get optimal configuration
        config_manager = ConfigManager()
        optimal_config = config_manager.get_optimal_config(
            model_size="7B",
            available_memory="32GB"
        )

        # 3. Enable multi-GPU (using optimal config)
        unsloth_multigpu.enable_multi_gpu(**optimal_config)
        """
    )
    assert found["optimal_config"]["num_gpus"] == (len(found["devices"]) or None)
    assert found["optimal_config"]["batch_size_per_gpu"] >= 1
    current = multi_gpu.current()
    assert current is not None
    assert current.batch_size_per_gpu == found["optimal_config"]["batch_size_per_gpu"]
