"""A step that runs out of memory is retried with smaller micro-batches, with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.engine.step.loss import LossModel
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, train_here, values


def make(root: Path, name: str, micro: int, steps: int = 3) -> RunDir:
    config = TrainConfig.model_validate(
        {
            "model": {"path": str(root / "model")},
            "data": {"path": str(root / "data.jsonl"), "seq_len": 48, "cache_dir": str(root / "cache")},
            "method": {"rank": 4},
            "train": {"global_batch_size": 8, "max_steps": steps, "learning_rate": 1e-2, "schedule": "constant"},
            "checkpoint": {"every_steps": 2},
        }
    )
    return make_run(root / name, config, make_plan(config, micro=micro))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    toy.write_llama(tmp_path / "model")
    toy.write_jsonl(tmp_path / "data.jsonl", toy.arithmetic(60))
    return tmp_path


def limit_memory(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate memory for `rows` sequences at a time; return the sizes that were tried."""
    plain, tried = LossModel.forward, []

    def forward(self: LossModel, input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        tried.append(len(input_ids))
        loss = plain(self, input_ids, *others)
        if len(input_ids) > rows:
            raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB.")
        return loss

    monkeypatch.setattr(LossModel, "forward", forward)
    return tried


@pytest.mark.seed("S3-064", "S3-071")
def test_result_equals_a_run_with_smaller_micro_batches(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = values(train_here(make(root, "small", 2)), "train.step", "loss")
    tried = limit_memory(2, monkeypatch)
    events = train_here(make(root, "large", 8))
    assert values(events, "train.step", "loss") == expected
    assert tried[:3] == [8, 4, 2]
    assert max(tried[3:]) == 2, "sizes that do not fit are not tried again"
    warnings = values(events, "warning", "message")
    assert [f"with {n} sequences at a time" in message for n, message in zip((8, 4), warnings, strict=True)] == [
        True
    ] * 2


def test_resumed_run_keeps_the_smaller_micro_batch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(root, "first", 8, steps=2)
    tried = limit_memory(2, monkeypatch)
    train_here(run)
    run.write_config(run.config().model_copy(update={"train": run.config().train.model_copy(update={"max_steps": 4})}))
    tried.clear()
    train_here(run)
    assert tried
    assert max(tried) == 2


def test_single_sequence_that_does_not_fit_raises_with_advice(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(root, "none", 8)
    limit_memory(0, monkeypatch)
    with pytest.raises(OutOfMemoryError) as caught:
        train_here(run)
    assert "train.activation_checkpointing" in (caught.value.fix or "")
    assert "micro_batch_size" not in (caught.value.fix or ""), "already at the smallest size"
    assert len(values(raw_events(run.path), "warning", "message")) == 3
