"""Rollback: older weights with newer samples, bounded, and exact after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from pantheraml.base.errors import NonFiniteError
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, merged, seed_with, train_here, values

BAD_ROW, BAD_STEP = 3, 7

Straight = tuple[RunDir, list[dict[str, Any]]]
"""An uninterrupted run and its events."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollback")
    toy.write_poisoned_llama(folder / "model")
    rows = toy.arithmetic(40)
    rows[BAD_ROW]["prompt"] += toy.RARE
    toy.write_jsonl(folder / "data.jsonl", rows)
    return folder


def config_of(root: Path, **changes: Any) -> TrainConfig:
    base = {
        "model": {"path": str(root / "model")},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": False, "cache_dir": str(root / "cache")},
        "method": {"kind": "lora", "rank": 4, "dropout": 0.1},
        "train": {"global_batch_size": 4, "max_steps": 12, "learning_rate": 5e-3, "schedule": "constant"},
        "stability": {"on_nonfinite": "roll_back"},
        "checkpoint": {"every_steps": 2},
    }
    return TrainConfig.model_validate(merged(base, changes))


def run_of(root: Path, name: str, **changes: Any) -> RunDir:
    config = config_of(root, **changes)
    config.train.seed = seed_with(config, BAD_ROW, step=BAD_STEP - 1)
    return make_run(root / name, config, make_plan(config, micro=2))


def bad_step(events: list[dict[str, Any]]) -> int:
    return next(event["step"] for event in events if event["kind"] == "verdict")


def same_adapter(one: RunDir, other: RunDir) -> bool:
    ours, theirs = (load_file(run.path / "adapter" / "adapter_model.safetensors") for run in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.fixture(scope="module")
def uninterrupted(root: Path) -> Straight:
    run = run_of(root, "uninterrupted")
    return run, train_here(run)


def test_rollback_restores_an_older_checkpoint(root: Path, uninterrupted: Straight) -> None:
    _, events = uninterrupted
    at = bad_step(events)
    to = (at - 2) // 2 * 2
    assert (at, to) == (BAD_STEP, 4)
    assert values(events, "verdict", "action") == ["roll_back"]
    (warning,) = [message for message in values(events, "warning", "message") if "rolled back" in message]
    assert f"weights of step {to};" in warning
    assert values(events, "train.step", "step") == list(range(1, 13)), "no step is counted twice"
    just_rolled_back = run_of(root, "just rolled back", train={"max_steps": at})
    never_went_on = run_of(root, "never went on", train={"max_steps": to})
    for run in (just_rolled_back, never_went_on):
        train_here(run)
    assert same_adapter(just_rolled_back, never_went_on)
    check_resumes_exactly(just_rolled_back, uninterrupted)


def test_run_stopped_before_a_rollback_resumes_exactly(root: Path, uninterrupted: Straight) -> None:
    before = run_of(root, "before", train={"max_steps": bad_step(uninterrupted[1]) - 1})
    train_here(before)
    check_resumes_exactly(before, uninterrupted)


def test_run_stopped_by_a_bad_step_resumes_exactly(root: Path) -> None:
    skipping, stopped = (
        run_of(root, way, stability={"on_nonfinite": way}, checkpoint={"every_steps": None}) for way in ("skip", "stop")
    )
    expected = train_here(skipping)
    with pytest.raises(NonFiniteError):
        train_here(stopped)
    stopped.write_config(skipping.config())
    assert values(train_here(stopped), "train.step", "loss") == values(expected, "train.step", "loss")
    assert same_adapter(stopped, skipping)


def check_resumes_exactly(run: RunDir, uninterrupted: Straight) -> None:
    """Check that the resumed run ends like the uninterrupted one."""
    whole, events = uninterrupted
    config = run.config()
    run.write_config(config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 12})}))
    assert values(train_here(run), "train.step", "loss") == values(events, "train.step", "loss")
    assert same_adapter(run, whole)


def test_rollbacks_are_counted_over_the_whole_run(root: Path) -> None:
    run = run_of(root, "twice", train={"max_steps": 20}, stability={"max_rollbacks": 1})
    with pytest.raises(NonFiniteError, match=r"after 1 rollback\(s\)"):
        train_here(run)  # the second epoch has the bad sample again


def test_rollback_without_an_old_enough_checkpoint_stops(root: Path) -> None:
    run = run_of(root, "too far", stability={"rollback_steps": 100})
    with pytest.raises(NonFiniteError, match="no checkpoint is old enough to roll back to"):
        train_here(run)


def test_rollback_requires_checkpoints(root: Path) -> None:
    with pytest.raises(ValidationError, match=r"checkpoint\.every_steps"):
        config_of(root, checkpoint={"every_steps": None})
