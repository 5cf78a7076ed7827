"""run.json as a fold of the stream: complete, failed, crashed, resumed and empty runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import StorageError
from pantheraml.readers.summary import history, summarise, write_run_json


def test_a_complete_run(complete: Any) -> None:
    found = summarise(complete.events)
    steps = [event for event in complete.events if event["kind"] == "train.step"]
    evals = [event for event in complete.events if event["kind"] == "eval.done"]
    assert found == {
        "schema_version": 1,
        "status": "succeeded",
        "error": None,
        "steps": 120,
        "total_steps": 120,
        "epochs": 1.2,
        "first_loss": steps[0]["loss"],
        "final_loss": steps[-1]["loss"],
        "concern": None,
        "best_eval_loss": min(event["loss"] for event in evals),
        "final_eval_loss": evals[-1]["loss"],
        "final_perplexity": evals[-1]["perplexity"],
        "tokens": 120 * 32_000,
        "target_tokens": 120 * 20_000,
        # 120 steps of 0.5 s, four evaluations of 0.4 s, two checkpoints of 0.2 s
        "seconds": pytest.approx(62.0),
        "tokens_per_second": 64_000,
        "peak_memory_bytes": 17_000_120_000,
        "world_size": 2,
        "fallback_reason": None,
        "device": "cuda",
        "precision": "bf16",
        "parameters": 1_235_814_400,
        "trainable_parameters": 11_272_192,
        "data": found["data"],
        "checkpoints": [120],
        "skipped_steps": 0,
        "starts": 1,
        "started": "2027-01-15T08:00:00+00:00",
        "finished": "2027-01-15T08:01:05+00:00",
        "command": "train",
        "pantheraml": "0.1.0",
        "output": {"path": "adapter", "form": "adapter"},
    }
    assert found["data"]["train"]["rows"] == 12_000
    assert found["data"]["eval"]["rows"] == 240
    assert "time" not in found["data"]["train"]


def test_an_empty_stream_knows_nothing() -> None:
    found = summarise([])
    known = {"schema_version": 1, "data": {}, "checkpoints": [], "skipped_steps": 0, "starts": 0}
    assert {name: value for name, value in found.items() if value is not None} == known


def test_a_run_under_way(story: Any) -> None:
    story.begin()
    assert summarise(story.events)["status"] == "running"
    assert summarise(story.events)["precision"] == "bf16", "the plan knows it before the model is loaded"
    story.train(1, 3, total=10)
    found = summarise(story.events)
    assert (found["status"], found["steps"], found["total_steps"]) == ("running", 3, 10)
    assert found["seconds"] == pytest.approx(1.5)


def test_what_a_run_got_over_is_no_error_of_its_end(story: Any) -> None:
    story.begin()
    story.train(1, 3, total=10)
    story.tell("error", error="WorkerError", what="Lost.", where=None, todo=None, exit_code=70)
    assert summarise(story.events)["error"]["what"] == "Lost."
    story.tell("run.restarted", message="Rank 1 was killed. The run goes on.", step=2, world_size=2)
    assert summarise(story.events)["error"] is None
    assert summarise(story.events)["status"] == "running"


def test_a_fallback_is_recorded_until_the_processes_are_started_anew(story: Any) -> None:
    story.begin()
    reason = "rank 1 cannot use its device: it fell off the bus"
    story.tell("run.fallback", message=f"one process goes on: {reason}", reason=reason, planned_world_size=2)
    story.tell("warning", message="something else")
    assert summarise(story.events)["fallback_reason"] == reason
    story.tell("run.restarted", message="Rank 0 was killed. The run goes on.", step=2, world_size=2)
    assert summarise(story.events)["fallback_reason"] is None


def test_a_date_that_is_set_meanwhile_takes_no_time(story: Any) -> None:
    story.begin()
    story.train(1, 3, total=10)
    story.date_set_by = 86_400.0
    story.step(4, 10)
    story.date_set_by = -86_400.0
    story.step(5, 10)
    assert summarise(story.events)["seconds"] == pytest.approx(2.5)


def test_steps_repeated_after_a_resume_count_once(story: Any) -> None:
    story.begin()
    story.train(1, 60, total=100, eval_every=20)
    story.tell("verdict", step=55, action="skip", cause="inf in the gradient")
    story.save(40)
    story.now += 10_000  # the machine was off
    story.begin()
    story.train(41, 50, total=100, pace=1.0)
    story.tell("run.finished", status="stopped", seconds=1.0)
    found, past = summarise(story.events), history(story.events)
    assert (found["steps"], found["starts"], found["status"]) == (50, 2, "stopped")
    assert list(past.steps) == list(range(1, 51))
    assert found["tokens"] == 50 * 32_000
    assert past.steps[45]["seconds"] == 1.0, "the later leg replaces the earlier one"
    assert list(past.evals) == [20, 40], "the evaluation of step 60 belongs to weights that are gone"
    assert found["skipped_steps"] == 0, "so does the step skipped at 55"
    # 60 steps, three evaluations, a checkpoint; then ten steps of a second; not the night between
    assert found["seconds"] == pytest.approx(30 + 1.2 + 0.2 + 10)


def test_a_resume_that_dies_before_its_first_step(story: Any) -> None:
    story.begin()
    story.train(1, 60, total=100)
    story.begin()
    story.train(41, 40, total=100)
    assert summarise(story.events)["steps"] == 40


def test_speed_leaves_out_the_warm_up_of_every_start(story: Any) -> None:
    story.begin()
    for pace in (60, 30, 9, 1, 1):
        story.step(len(story.events), 10, after=pace)
    story.begin()
    for pace in (60, 30, 9, 2, 2):
        story.step(len(story.events), 10, after=pace)
    assert summarise(story.events)["tokens_per_second"] == pytest.approx(32_000 * (1 + 0.5) / 2)


def test_a_run_shorter_than_the_warm_up_still_has_a_speed(story: Any) -> None:
    story.train(1, 2)
    assert summarise(story.events)["tokens_per_second"] == 64_000


def test_totals_are_the_sums_of_the_events(story: Any) -> None:
    story.begin()
    story.tell("train.started", first_step=1, total_steps=25, world_size=1, device="cpu", global_batch_size=4)
    for step in (10, 20):
        story.step(step, 25)
    story.finish(22)
    found = summarise(story.events)
    told = sum(event["tokens"] for event in story.events if event["kind"] == "train.step")
    assert (found["steps"], found["tokens"]) == (22, told)


def error(story: Any, kind: str, what: str) -> None:
    story.tell("error", error=kind, what=what, where="rank 1", todo="Lower it.", exit_code=18)


def test_a_failure_names_its_cause_not_its_consequences(story: Any) -> None:
    story.begin()
    story.train(1, 5, total=10)
    story.step(6, 10, loss="nan")
    error(story, "WorkerError", "lost the connection to rank 1")
    error(story, "NonFiniteError", "The loss is nan.")
    assert summarise(story.events)["status"] == "failed", "killed before it could write its end"
    story.tell("run.finished", status="crashed", seconds=3.0)
    found = summarise(story.events)
    assert found["status"] == "crashed"
    assert found["error"] == {
        "class": "NonFiniteError", "what": "The loss is nan.", "where": "rank 1", "todo": "Lower it.", "exit_code": 18,
    }  # fmt: skip
    assert found["final_loss"] == "nan"

    story.begin()
    assert summarise(story.events)["error"] is None, "a new start begins with a clean slate"


def test_an_evaluation_that_is_not_finite_is_never_the_best(story: Any) -> None:
    story.evaluate(10)
    story.tell("eval.done", step=20, loss="nan", perplexity="nan", target_tokens=1, seconds=0.1)
    found = summarise(story.events)
    assert math.isfinite(found["best_eval_loss"])
    assert found["final_eval_loss"] == "nan"


def test_run_json_is_strict_json_with_the_extra_fields(complete: Any, tmp_path: Path) -> None:
    run_dir = complete.write(tmp_path / "run")
    returned = write_run_json(run_dir, {"exact_match_after": 0.97, "status": "crashed"})
    stored = json.loads((run_dir / "run.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert stored == returned
    assert (stored["exact_match_after"], stored["status"], stored["steps"]) == (0.97, "crashed", 120)
    assert sorted(path.name for path in run_dir.iterdir()) == ["events.jsonl", "run.json"]


def test_a_run_json_that_cannot_be_written_is_a_clear_error(complete: Any, tmp_path: Path) -> None:
    run_dir = complete.write(tmp_path / "run")
    (run_dir / "run.json").mkdir()
    with pytest.raises(StorageError, match=r"run\.json"):
        write_run_json(run_dir)
    assert sorted(path.name for path in run_dir.iterdir()) == ["events.jsonl", "run.json"]
