"""PantheraMLDistributedTrainer on two ranks equals one process; aggregation, drift check, events and resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.event_stream import read_events
from pantheraml.base.events import HardwareFound, HardwareSampled, RanksLeftOut, TrainRanks, TrainStarted, TrainStep
from pantheraml.readers.report import write_report
from tests import toy
from tests.distributed.launching import run_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("trainer")
    model = toy.write_llama(root / "model", initializer_range=0.2)
    for name in ("one", "two"):
        (root / name).mkdir()
    run_ranks("trainer_ranks", 2, root / "two", model)
    run_ranks("trainer_ranks", 1, root / "one", model, root / "two" / "mean" / "checkpoint-3")
    ranks = [json.loads((root / "two" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {"root": root, "one": json.loads((root / "one" / "rank-0.json").read_text()), "ranks": ranks}


@pytest.mark.seed("S0-030", "S0-044", "S0-046", "S0-096")
def test_two_ranks_equal_one_process(runs: dict[str, Any]) -> None:
    one, (first, second) = runs["one"]["mean"], (rank["mean"] for rank in runs["ranks"])
    assert first["wrapped"] == "DistributedDataParallel"
    assert first["weights"] == second["weights"]
    assert len(set(one["loss"])) == 6, "a model that does not train would pass the checks below"
    assert first["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert first["weights"] == pytest.approx(one["weights"], abs=1e-5)


def test_resume_on_two_ranks_is_exact(runs: dict[str, Any]) -> None:
    for rank in runs["ranks"]:
        assert rank["resumed"]["weights"] == rank["straight"]["weights"]
        assert rank["resumed"]["loss"][-3:] == rank["straight"]["loss"][-3:]


def test_all_ranks_learn_that_there_is_no_checkpoint(runs: dict[str, Any]) -> None:
    for rank in runs["ranks"]:
        assert "contains no usable checkpoint" in rank["no checkpoint"]


def test_checkpoint_of_two_ranks_resumes_in_one_process(runs: dict[str, Any]) -> None:
    assert runs["one"]["from two ranks"]["weights"] == pytest.approx(runs["one"]["mean"]["weights"], abs=1e-5)


def test_aggregation(runs: dict[str, Any]) -> None:
    """The median of two ranks is the mean of their token means, which is not that over all tokens."""
    found = runs["ranks"][0]
    mean = found["mean"]["weights"]
    assert found["weighted"]["weights"] == pytest.approx(mean, abs=1e-6)
    assert found["median"]["weights"] == pytest.approx(found["rank means"]["weights"], abs=1e-6)
    assert found["median"]["weights"] != pytest.approx(mean, abs=1e-5)
    assert runs["ranks"][1]["median"]["weights"] == found["median"]["weights"]


def test_rank_with_nan_is_left_out(runs: dict[str, Any]) -> None:
    first, second = (rank["left out"] for rank in runs["ranks"])
    assert first["weights"] == second["weights"]
    assert all(map(math.isfinite, first["weights"]))
    assert first["weights"] != pytest.approx(runs["ranks"][0]["mean"]["weights"], abs=1e-6)
    events = read_events(runs["root"] / "two" / "left-out")
    assert [(event.step, event.ranks) for event in events if isinstance(event, RanksLeftOut)] == [(2, [1])]


def test_diverged_replicas_stop_the_run(runs: dict[str, Any]) -> None:
    for rank in runs["ranks"]:
        assert "diverged" in rank["drift"]
        assert "step 2" in rank["drift"]


def test_settings_are_checked_against_the_ranks(runs: dict[str, Any]) -> None:
    for rank in runs["ranks"]:
        assert "trimmed_mean" in rank["trimmed"]
        assert "2 processes were launched" in rank["processes"]


@pytest.mark.seed("S0-029", "S0-031", "S0-045", "S0-047")
def test_events_of_two_ranks(runs: dict[str, Any]) -> None:
    root: Path = runs["root"]
    one, two = (read_events(root / name / "mean") for name in ("one", "two"))
    (started,) = [event for event in two if isinstance(event, TrainStarted)]
    assert (started.world_size, started.global_batch_size) == (2, 8)
    steps = [[event for event in events if isinstance(event, TrainStep)] for events in (one, two)]
    assert [(e.tokens, e.target_tokens) for e in steps[0]] == [(e.tokens, e.target_tokens) for e in steps[1]]
    ranks = [event for event in two if isinstance(event, TrainRanks)]
    assert [sum(event.tokens) for event in ranks] == [event.tokens for event in steps[1]]
    for events in (one, two):
        (hardware,) = [event for event in events if isinstance(event, HardwareFound)]
        assert hardware.cpu_count >= 1
        sampled = [event for event in events if isinstance(event, HardwareSampled)]
        assert sum(event.samples for event in sampled) >= 1
        assert max(event.ram_bytes for event in sampled) > 0
    assert "2 processes" in write_report(root / "two" / "mean").read_text()
