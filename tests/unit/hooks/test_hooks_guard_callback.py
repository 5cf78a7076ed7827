"""The guard in TRL's SFTTrainer: the trainer's own clipping is matched, bad steps are met by the policy, and resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from pantheraml.base.errors import ConfigError, NonFiniteError
from pantheraml.hooks.guard_callback import GuardCallback
from tests import toy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return toy.write_llama(tmp_path_factory.mktemp("guard") / "model", initializer_range=0.2)


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def trainer(folder: Path, output: Path, callback: GuardCallback | None, **settings: Any) -> SFTTrainer:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fixed = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return SFTTrainer(
        model=get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")),
        args=SFTConfig(output_dir=str(output), **{**fixed, **settings}),
        train_dataset=Dataset.from_list(toy.arithmetic(32)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[] if callback is None else [callback],
    )


def weights(run: SFTTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.model.named_parameters() if value.requires_grad}


def nan_at(run: SFTTrainer, step: int) -> None:
    """The gradient of one tensor is NaN in that step."""
    calls = [0]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return gradient * torch.nan if calls[0] == step else gradient

    next(value for name, value in run.model.named_parameters() if "lora_B" in name).register_hook(spoil)


def test_clipping_is_that_of_the_trainer_it_is_taken_from(folder: Path, tmp_path: Path) -> None:
    ours, theirs = trainer(folder, tmp_path, GuardCallback()), trainer(folder, tmp_path, None)
    for run in (ours, theirs):
        run.train()
    expected = weights(theirs)
    for name, value in weights(ours).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    assert ours.args.max_grad_norm == 0.05, "as it was given"


def test_a_bad_step_is_survived(folder: Path, tmp_path: Path) -> None:
    guard = GuardCallback(on_nonfinite="skip")
    run = trainer(folder, tmp_path, guard)
    nan_at(run, 2)
    run.train()
    ((step, verdict),) = guard.verdicts
    assert (step, verdict.action) == (2, "skip")
    assert all(value.isfinite().all() for value in weights(run).values())


def test_a_lowered_rate_is_that_of_the_steps_to_come(folder: Path, tmp_path: Path) -> None:
    """And the schedule's stays what it is."""
    guard = GuardCallback(on_nonfinite="lower_rate", rate_factor=0.25, clipping="none")
    run = trainer(folder, tmp_path, guard, max_steps=3, optim="sgd", lr_scheduler_type="linear")
    nan_at(run, 1)
    taken: list[float] = []
    run.create_optimizer()
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: taken.append(optimizer.param_groups[0]["lr"]))
    run.train()
    assert taken == pytest.approx([0.25 * 1e-2 * left / 3 for left in (3, 2, 1)])
    logged = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx([1e-2 * left / 3 for left in (3, 2, 1)])
    assert guard.state()["attributes"]["learnt"]["policy"]["rate_factor"] == 0.25


def test_a_bad_step_stops_the_training_before_it_is_taken(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path, GuardCallback())
    nan_at(run, 2)
    with pytest.raises(NonFiniteError, match="stopped at step 2"):
        run.train()
    assert all(value.isfinite().all() for value in weights(run).values())


def test_weights_that_are_not_finite_are_no_success(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path, GuardCallback(on_nonfinite="detect"))
    nan_at(run, 2)
    with pytest.raises(NonFiniteError, match="weights are not finite"):
        run.train()


def test_what_it_has_learnt_resumes(folder: Path, tmp_path: Path) -> None:
    settings = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    straight = trainer(folder, tmp_path / "one", GuardCallback(**settings), **saved)
    straight.train()
    resumed = trainer(folder, tmp_path / "two", GuardCallback(**settings), **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_what_a_callback_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_spike=roll_back"):
        GuardCallback(on_spike="roll_back")
    with pytest.raises(ConfigError, match="on_nonfinite=zero"):
        GuardCallback(on_nonfinite="zero")
