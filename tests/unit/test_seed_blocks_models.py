"""Code blocks of the product documents about loading, trainers and hooks; see tests/seed_blocks.py.

The model names are folders beside the script, which hold tiny models.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig
from torch.utils.data import DataLoader
from trl import SFTConfig

import pantheraml
from pantheraml.base.errors import MissingExtraError
from pantheraml.hooks import multi_gpu
from pantheraml.hooks import peft as peft_hooks
from pantheraml.hooks import trl as trl_hooks
from pantheraml.specs.multi_gpu import MultiGPUConfig
from tests import toy
from tests.seed_blocks import adapted, run

NAMES = (
    "unsloth/llama-2-7b-bnb-4bit",
    "unsloth/llama-2-7b-chat-bnb-4bit",
    "unsloth/Llama-3.2-1B-Instruct",
    "model_name",
)


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


def dataset() -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"], "completion": row["completion"]} for row in toy.arithmetic(16)])


def settings() -> dict[str, Any]:
    return {"output_dir": "outputs", "max_steps": 2, "report_to": [], "disable_tqdm": True}


@pytest.fixture
def arguments(playground: Path) -> dict[str, Any]:
    """The arguments of a trainer that documents leave out."""
    model, tokenizer = pantheraml.FastLanguageModel.from_pretrained("model_name", max_seq_length=128)
    model = pantheraml.FastLanguageModel.get_peft_model(model)
    args = SFTConfig(**settings())
    return {"model": model, "processing_class": tokenizer, "train_dataset": dataset(), "args": args}


@pytest.mark.seed("S0:83", "S0-053", "S0-054", "S0-055", "S0-056", "S0-058")
def test_s0_configuration() -> None:
    found = run("S0:83", MultiGPUConfig=pantheraml.MultiGPUConfig)
    assert found["config"] == MultiGPUConfig(auto_device_map=True, use_gradient_checkpointing=True)


@pytest.mark.seed("S0:121", "S0-049", "S0-051", "S0-052", "S0-063", "S0-064", "S0-065")
def test_s0_basic_multi_gpu_training() -> None:
    """4-bit weights are frozen, so the trainer also gets an adapter."""
    adapter = LoraConfig(target_modules="all-linear")
    found = run("S0:121", dataset=dataset(), settings=settings(), adapter=adapter)
    assert found["trainer"].state.global_step == 2


@pytest.mark.seed("S0:185", "S0-088", "S0-089")
def test_s0_from_one_gpu_to_several(arguments: dict[str, Any]) -> None:
    assert isinstance(run("S0:185", arguments=arguments)["trainer"], pantheraml.PantheraMLDistributedTrainer)


@pytest.mark.seed("S0:199", "S0-050", "S0-057")
def test_s0_migration_of_the_configuration(arguments: dict[str, Any]) -> None:
    found = run("S0:199", arguments=arguments, PantheraMLDistributedTrainer=pantheraml.PantheraMLDistributedTrainer)
    found["trainer"].train()
    assert found["trainer"].state.global_step == 2


@pytest.mark.seed("S2:29", "S2-010", "S2-011", "S2-012", "S2-033")
def test_s2_function_parameter() -> None:
    assert run("S2:29")["tokenizer"].model_max_length == 2048


@pytest.mark.seed("S2:46", "S2-016", "S2-017", "S2-018", "S2-020")
def test_s2_single_process_training() -> None:
    assert run("S2:46", dataset=dataset())["trainer"].state.global_step == 2


@pytest.mark.seed("S2:100", "S2-025", "S2-026", "S2-027")
def test_s2_distributed_training() -> None:
    """The script, as a single process; `torchrun` starts it in tests/e2e/test_e2e_trainer.py."""
    assert run("S2:100", dataset=dataset())["trainer"].state.global_step == 2


@pytest.mark.seed("S2:214", "S2-062", "S2-063")
def test_s2_debug_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The Python of `python -c "..."`; `pantheraml verify` is run by tests/e2e/test_e2e_verify.py."""
    scripts = re.findall(r'^python -c "(.*?)"$', adapted("S2:214"), re.MULTILINE | re.DOTALL)
    assert len(scripts) == 2
    assert adapted("S2:214").endswith("\npantheraml verify --nproc 2\n")
    for script in scripts:
        exec(compile(script, "S2:214", "exec"), {})
    count, found = capsys.readouterr().out.splitlines()
    assert count == f"GPUs: {torch.cuda.device_count()}"
    assert "'enabled': True" in found


@pytest.mark.seed("S2:243", "S2-066", "S2-067")
def test_s2_trainers_of_both_options(arguments: dict[str, Any]) -> None:
    found = run("S2:243", arguments=arguments)
    found["trainer"].train()
    assert found["trainer"].state.global_step == 2


@pytest.mark.seed(
    "S3:45",
    "S3-014",
    "S3-015",
    "S3-016",
    "S3-017",
    "S3-018",
    "S3-019",
    "S3-020",
    "S3-021",
    "S3-022",
    "S3-004",
)
def test_s3_method_1() -> None:
    """The other training parameters: an adapter, since 4-bit weights are frozen, and a short run."""
    others = {"peft_config": LoraConfig(target_modules="all-linear"), "max_steps": 2, "output_dir": "outputs"}
    stats = run("S3:45", dataset=dataset(), others=others)["trainer_stats"]
    assert stats.global_step == 2
    assert stats.training_loss > 0


@pytest.mark.seed("C17")
@pytest.mark.seed("S3-009")
def test_s3_without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.trainer.sft_config", None)
    with pytest.raises(MissingExtraError, match="unsloth_train needs TRL") as caught:
        pantheraml.unsloth_train(model=object(), train_dataset=dataset())
    assert caught.value.fix == "pip install trl"


@pytest.mark.seed("S3:74", "S3-023", "S3-024", "S3-025", "S3-026", "S3-027", "S3-028")
def test_s3_method_2() -> None:
    rows: Any = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(6)]
    found = run("S3:74", dataloader=DataLoader(rows, 2), torch=torch)
    found["trainer"].cleanup()
    assert (found["epoch_stats"]["steps"], found["epoch_stats"]["samples"]) == (3, 6)


@pytest.mark.seed("S3:101", "S3-029", "S3-030", "S3-031", "S3-032", "S3-033", "S3-034")
def test_s3_advanced_configuration() -> None:
    found = run("S3:101", unsloth_multigpu=pantheraml)
    assert found["optimal_config"]["num_gpus"] == (len(found["devices"]) or None)
    assert found["optimal_config"]["batch_size_per_gpu"] >= 1
    current = multi_gpu.current()
    assert current is not None
    assert current.batch_size_per_gpu == found["optimal_config"]["batch_size_per_gpu"]
