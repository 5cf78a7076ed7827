"""What of a run's events its user gets to read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pantheraml.base import events
from pantheraml.service.jobs.ingest import PathHider, to_job_event


def unchanged(text: str) -> str:
    return text


def step(loss: float, rank: int = 0) -> events.TrainStep:
    known = {"epoch": 1.0, "learning_rate": 0.1, "grad_norm": math.inf, "tokens": 3, "target_tokens": 2, "seconds": 1.0}
    return events.TrainStep(step=4, loss=loss, tokens_per_second=None, memory_bytes=None, rank=rank, **known)


def test_figures_are_json(tmp_path: Path) -> None:
    event = to_job_event("ftjob-1", step(math.nan), unchanged)
    assert event is not None
    assert (event.step, event.data["train_loss"], event.data["grad_norm"]) == (4, None, None)
    assert event.data["learning_rate"] == 0.1


def test_only_the_first_rank_speaks_and_only_of_what_users_need() -> None:
    assert to_job_event("ftjob-1", step(1.0, rank=1), unchanged) is None
    assert to_job_event("ftjob-1", events.Heartbeat(step=1), unchanged) is None
    saved = to_job_event("ftjob-1", events.CheckpointSaved(step=1, path="/a", bytes=2, seconds=1, best=True), unchanged)
    assert saved is not None
    assert "path" not in saved.data


@pytest.mark.parametrize("name", ["error", "notice"])
def test_folders_of_the_machine_are_not_named(tmp_path: Path, name: str) -> None:
    hide = PathHider({"[models]": tmp_path / "data" / "models", "[data]": tmp_path / "data"})
    text = f"{tmp_path}/data/models/tiny and {tmp_path}/data/jobs/1"
    told = {
        "error": events.ErrorRaised(error="E", what=text, where=text, fix=text, exit_code=1, traceback=text),
        "notice": events.Notice(message=text),
    }
    event = to_job_event("ftjob-1", told[name], hide)
    assert event is not None
    assert event.message == "[models]/tiny and [data]/jobs/1"
    assert str(tmp_path) not in str(event.data)


def test_relative_folders_are_not_named_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hide = PathHider({"[data]": Path("data")})
    assert hide(f"{tmp_path}/data/x") == "[data]/x"
