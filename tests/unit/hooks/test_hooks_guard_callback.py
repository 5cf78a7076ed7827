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
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState
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


def nan_at(run: SFTTrainer, *steps: int, value: float = torch.nan) -> None:
    """Half of the gradient of one tensor is NaN, or another `value`, in those steps."""
    calls = [0]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        half = torch.arange(gradient.numel()).reshape(gradient.shape) % 2 == 0
        return gradient.masked_fill(half, value) if calls[0] in steps else gradient

    spoilt_weights(run).register_hook(spoil)


def spoilt_weights(run: SFTTrainer) -> torch.nn.Parameter:
    return next(value for name, value in run.model.named_parameters() if "lora_B" in name)


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_taken_for_0(folder: Path, tmp_path: Path, bad: float) -> None:
    """And all others as they are, though the trainer makes them NaN before it asks. A step has two passes."""
    guard = GuardCallback(on_nonfinite="zero", clipping="value", clip_value=1e-3)
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run, like = (
        trainer(folder, tmp_path, callback, **settings)
        for callback in (guard, GuardCallback(clipping="value", clip_value=1e-3))
    )
    nan_at(run, 3, value=bad)  # the first pass of step 2
    nan_at(like, 3, value=0.0)
    for each in (run, like):
        each.train()
    assert [(step, verdict.action) for step, verdict in guard.verdicts] == [(2, "zero")]
    expected = weights(like)
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())


def test_zeros_are_bounded_and_then_everything_is_as_it_was_given(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path, GuardCallback(on_nonfinite="zero", max_skipped_steps=1))
    nan_at(run, 2, 3)
    with pytest.raises(NonFiniteError, match="stopped at step 3: the gradient norm is nan, after 1 skipped"):
        run.train()
    assert run.args.max_grad_norm == 0.05
    spoilt = spoilt_weights(run)
    spoilt.grad = None
    (spoilt * torch.nan).sum().backward()
    assert spoilt.grad is not None
    assert spoilt.grad.isnan().all(), "nobody makes them 0 any more"


@pytest.mark.parametrize(("bad", "back"), [(5, 2), (3, 0)])
def test_rolling_back_leaves_no_trace_of_the_steps_since(folder: Path, tmp_path: Path, bad: int, back: int) -> None:
    """Weights, optimizer and what clipping has learnt are those of then: as if the steps since had been skipped. Copies
    are of steps 0, 2 and 4, and have to be two steps older than the weights."""
    settings: dict[str, Any] = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    guard = GuardCallback(on_nonfinite="roll_back", rollback_steps=2, **settings)
    run, like = (
        trainer(folder, tmp_path, callback, max_steps=7)
        for callback in (guard, GuardCallback(on_nonfinite="skip", **settings))
    )
    nan_at(run, bad)
    nan_at(like, *range(back + 1, bad + 1))
    for each in (run, like):
        each.train()
    ((step, verdict),) = guard.verdicts
    assert (step, verdict.action) == (bad, "roll_back")
    assert f"back to the weights of step {back}" in verdict.cause
    expected = weights(like)
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())


def test_rolling_back_is_bounded(folder: Path, tmp_path: Path) -> None:
    """A second one goes to the beginning, too; a third is one too many."""
    guard = GuardCallback(on_nonfinite="roll_back", rollback_steps=2, max_rollbacks=2)
    run = trainer(folder, tmp_path, guard, max_steps=5)
    begun = weights(run)
    nan_at(run, 3, 4, 5)
    with pytest.raises(NonFiniteError, match="after 2 roll back"):
        run.train()
    assert all(torch.equal(value, begun[name]) for name, value in weights(run).items())
    early = trainer(folder, tmp_path, GuardCallback(on_nonfinite="roll_back", rollback_steps=2))
    nan_at(early, 2)
    with pytest.raises(NonFiniteError, match="no weights to roll back to are old enough"):
        early.train()


def test_a_training_that_was_broken_off_does_not_lose_the_clipping(folder: Path, tmp_path: Path) -> None:
    guard = GuardCallback()
    run = trainer(folder, tmp_path, guard)
    guard.on_train_begin(run.args, run.state, run.control, model=run.model)  # and then something went wrong
    run.train()
    assert run.args.max_grad_norm == 0.05


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


def test_a_second_training_owes_nothing_to_the_first(folder: Path, tmp_path: Path) -> None:
    """Neither its model nor what was learnt of it."""
    settings: dict[str, Any] = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    guard = GuardCallback(**settings)
    trainer(folder, tmp_path, guard, max_steps=2).train()
    again, like = trainer(folder, tmp_path, guard), trainer(folder, tmp_path, GuardCallback(**settings))
    for run in (again, like):
        run.train()
    expected = weights(like)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_what_a_callback_cannot_do_is_refused() -> None:
    for asked in ({"debug": True}, {"group_norms_every": 5}, {"update_ratio_every": 1}, {"spike_warmup_steps": 2}):
        (name,) = asked
        with pytest.raises(ConfigError, match=f"cannot do {name}={asked[name]}"):
            GuardCallback(**asked)
    args = SFTConfig(output_dir="nowhere", use_cpu=True, bf16=False, fsdp=True)
    with pytest.raises(ConfigError, match="every process holds whole"):
        GuardCallback().on_train_begin(args, TrainerState(), TrainerControl())
    GuardCallback(**GuardCallback(group_norms_every=0).state()["args"])


@pytest.mark.parametrize("settings", [{"clipping": "foo"}, {"foo": 3}])
def test_keys_and_values_that_it_does_not_know_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="foo"):
        GuardCallback(**settings)
