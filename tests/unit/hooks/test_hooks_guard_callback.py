"""GuardCallback in TRL's SFTTrainer: clipping matches the trainer's, bad steps follow the policy, and it resumes."""

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
    """Inject NaN, or another `value`, into half of one tensor's gradient in those backwards."""
    calls = [0]

    def inject(gradient: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        half = torch.arange(gradient.numel()).reshape(gradient.shape) % 2 == 0
        return gradient.masked_fill(half, value) if calls[0] in steps else gradient

    target_weight(run).register_hook(inject)


def target_weight(run: SFTTrainer) -> torch.nn.Parameter:
    return next(value for name, value in run.model.named_parameters() if "lora_B" in name)


def test_clipping_matches_the_trainer(folder: Path, tmp_path: Path) -> None:
    ours, theirs = trainer(folder, tmp_path, GuardCallback()), trainer(folder, tmp_path, None)
    for run in (ours, theirs):
        run.train()
    expected = weights(theirs)
    for name, value in weights(ours).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    assert ours.args.max_grad_norm == 0.05, "restored"


@pytest.mark.seed("S3-041")
def test_bad_step_is_skipped(folder: Path, tmp_path: Path) -> None:
    guard = GuardCallback(on_nonfinite="skip")
    run = trainer(folder, tmp_path, guard)
    nan_at(run, 2)
    run.train()
    ((step, verdict),) = guard.verdicts
    assert (step, verdict.action) == (2, "skip")
    assert all(value.isfinite().all() for value in weights(run).values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_values_are_zeroed_before_the_trainer_sees_them(folder: Path, tmp_path: Path, bad: float) -> None:
    """All others are unchanged, though the trainer would multiply them by NaN. Two micro-batches per step."""
    guard = GuardCallback(on_nonfinite="zero", clipping="value", clip_value=1e-3)
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    run, reference = (
        trainer(folder, tmp_path, callback, **settings)
        for callback in (guard, GuardCallback(clipping="value", clip_value=1e-3))
    )
    nan_at(run, 3, value=bad)  # the first micro-batch of step 2
    nan_at(reference, 3, value=0.0)
    for each in (run, reference):
        each.train()
    assert [(step, verdict.action) for step, verdict in guard.verdicts] == [(2, "zero")]
    expected = weights(reference)
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())


def test_zeroed_steps_are_limited_and_state_is_restored(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path, GuardCallback(on_nonfinite="zero", max_skipped_steps=1))
    nan_at(run, 2, 3)
    with pytest.raises(NonFiniteError, match="stopped at step 3: the gradient norm is nan, after 1 skipped"):
        run.train()
    assert run.args.max_grad_norm == 0.05
    target = target_weight(run)
    target.grad = None
    (target * torch.nan).sum().backward()
    assert target.grad is not None
    assert target.grad.isnan().all(), "the gradient hooks are removed"


@pytest.mark.parametrize(("bad", "back"), [(5, 2), (3, 0)])
def test_rollback_equals_skipping_the_steps(folder: Path, tmp_path: Path, bad: int, back: int) -> None:
    """Weights, optimizer and clipping statistics are restored, as if the steps since had been skipped. Snapshots are of
    steps 0, 2 and 4, and must be two steps older than the weights.
    """
    settings: dict[str, Any] = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    guard = GuardCallback(on_nonfinite="roll_back", rollback_steps=2, **settings)
    run, reference = (
        trainer(folder, tmp_path, callback, max_steps=7)
        for callback in (guard, GuardCallback(on_nonfinite="skip", **settings))
    )
    nan_at(run, bad)
    nan_at(reference, *range(back + 1, bad + 1))
    for each in (run, reference):
        each.train()
    ((step, verdict),) = guard.verdicts
    assert (step, verdict.action) == (bad, "roll_back")
    assert f"back to the weights of step {back}" in verdict.cause
    expected = weights(reference)
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())


def test_rollbacks_are_limited(folder: Path, tmp_path: Path) -> None:
    """A second one goes back to the start, too; a third is one too many."""
    guard = GuardCallback(on_nonfinite="roll_back", rollback_steps=2, max_rollbacks=2)
    run = trainer(folder, tmp_path, guard, max_steps=5)
    initial = weights(run)
    nan_at(run, 3, 4, 5)
    with pytest.raises(NonFiniteError, match="after 2 rollback"):
        run.train()
    assert all(torch.equal(value, initial[name]) for name, value in weights(run).items())
    early_run = trainer(folder, tmp_path, GuardCallback(on_nonfinite="roll_back", rollback_steps=2))
    nan_at(early_run, 2)
    with pytest.raises(NonFiniteError, match="no snapshot is old enough to roll back to"):
        early_run.train()


def test_interrupted_training_keeps_the_clipping_setting(folder: Path, tmp_path: Path) -> None:
    guard = GuardCallback()
    run = trainer(folder, tmp_path, guard)
    guard.on_train_begin(run.args, run.state, run.control, model=run.model)  # then interrupted
    run.train()
    assert run.args.max_grad_norm == 0.05


def test_lowered_learning_rate_applies_to_later_steps(folder: Path, tmp_path: Path) -> None:
    """The scheduler's own rate is unchanged."""
    guard = GuardCallback(on_nonfinite="lower_rate", rate_factor=0.25, clipping="none")
    run = trainer(folder, tmp_path, guard, max_steps=3, optim="sgd", lr_scheduler_type="linear")
    nan_at(run, 1)
    rates: list[float] = []
    run.create_optimizer()
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    run.train()
    assert rates == pytest.approx([0.25 * 1e-2 * left / 3 for left in (3, 2, 1)])
    logged = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert logged == pytest.approx([1e-2 * left / 3 for left in (3, 2, 1)])
    assert guard.state()["attributes"]["learnt"]["policy"]["rate_factor"] == 0.25


def test_stop_ends_training_before_the_optimizer_step(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path, GuardCallback())
    nan_at(run, 2)
    with pytest.raises(NonFiniteError, match="stopped at step 2"):
        run.train()
    assert all(value.isfinite().all() for value in weights(run).values())


def test_nonfinite_weights_raise_at_the_end(folder: Path, tmp_path: Path) -> None:
    run = trainer(folder, tmp_path, GuardCallback(on_nonfinite="detect"))
    nan_at(run, 2)
    with pytest.raises(NonFiniteError, match="weights are not finite"):
        run.train()


def test_guard_statistics_resume(folder: Path, tmp_path: Path) -> None:
    settings = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    straight = trainer(folder, tmp_path / "one", GuardCallback(**settings), **saved)
    straight.train()
    resumed = trainer(folder, tmp_path / "two", GuardCallback(**settings), **saved)
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_second_training_starts_fresh(folder: Path, tmp_path: Path) -> None:
    """Neither the model nor its statistics are carried over."""
    settings: dict[str, Any] = {"clipping": "adagc", "clip_warmup_steps": 1, "clip_growth": 0.5}
    guard = GuardCallback(**settings)
    trainer(folder, tmp_path, guard, max_steps=2).train()
    again, reference = trainer(folder, tmp_path, guard), trainer(folder, tmp_path, GuardCallback(**settings))
    for run in (again, reference):
        run.train()
    expected = weights(reference)
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_unsupported_callback_settings_raise() -> None:
    for settings in ({"debug": True}, {"group_norms_every": 5}, {"update_ratio_every": 1}, {"spike_warmup_steps": 2}):
        (name,) = settings
        with pytest.raises(ConfigError, match=f"does not support {name}={settings[name]}"):
            GuardCallback(**settings)
    args = SFTConfig(output_dir="nowhere", use_cpu=True, bf16=False, fsdp=True)
    with pytest.raises(ConfigError, match="full model on every rank"):
        GuardCallback().on_train_begin(args, TrainerState(), TrainerControl())
    GuardCallback(**GuardCallback(group_norms_every=0).state()["args"])


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"clipping": "foo"}, "See docs/stability.md for its keys."),
        ({"foo": 3}, "Use one of its fields: "),
        ({"cliping": "norm"}, "Did you mean `clipping`? See docs/stability.md for its keys."),
    ],
)
def test_unknown_keys_and_values_are_rejected(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))) as caught:
        GuardCallback(**settings)
    assert f"\n  fix: {fix}" in str(caught.value)
    assert str(caught.value).count("fix:") == 1
