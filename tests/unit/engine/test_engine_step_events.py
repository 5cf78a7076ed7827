from __future__ import annotations

from pathlib import Path

import pytest

from pantheraml.specs.train import TrainConfig
from tests import toy
from tests.harness import make_plan, make_run, train_here, values


@pytest.mark.parametrize(("epochs", "batch"), [(1, 16), (1, 3), (2.5, 4), (2, 5)])
def test_partial_last_step_ends_at_the_exact_epoch(tmp_path: Path, epochs: float, batch: int) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "one and one is two"}\n' * 10)
    settings = {
        "model": {"path": str(toy.write_llama(tmp_path / "model"))},
        "data": {"path": str(data), "packing": False, "cache_dir": str(tmp_path / "cache")},
        "train": {"epochs": epochs, "global_batch_size": batch},
    }
    config = TrainConfig.model_validate(settings)
    reported_epochs = values(
        train_here(make_run(tmp_path / "run", config, make_plan(config, micro=batch))), "train.step", "epoch"
    )
    assert reported_epochs == sorted(reported_epochs)
    assert reported_epochs[-1] == pytest.approx(epochs)
    assert reported_epochs[:-1] == pytest.approx([(step + 1) * batch / 10 for step in range(len(reported_epochs) - 1)])
