"""run.json of complete, failed, crashed, resumed and empty runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import StorageError
from pantheraml.readers.summary import history, summarize, write_run_json


def test_a_complete_run(complete: Any) -> None:
    found = summarize(complete.events)
    steps = [event for event in complete.events if event.kind == "train.step"]
    evals = [event for event in complete.events if event.kind == "eval.done"]
    assert found == {
        "schema_version": 1,
        "status": "succeeded",
        "error": None,
        "steps": 120,
        "total_steps": 120,
        "epochs": 1.2,
        "first_loss": steps[0].loss,
        "final_loss": steps[-1].loss,
        "concern": None,
        "best_eval_loss": min(event.loss for event in evals),
        "final_eval_loss": evals[-1].loss,
        "final_perplexity": evals[-1].perplexity,
        "tokens": 120 * 32_000,
        "target_tokens": 120 * 20_000,
        # 120 steps of 0.5 s, four evaluations of 0.4 s, two checkpoints of 0.2 s
        "seconds": pytest.approx(62.0),
        "tokens_per_second": 64_000,
        "step_seconds": 0.5,
        "predicted_step_seconds": None,
        "peak_memory_bytes": 17_000_120_000,
        "reserved_memory_bytes": None,
        "predicted_memory_bytes": None,
        "gpu_utilization_percent": None,
        "energy_joules": None,
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


def test_summary_of_an_empty_stream() -> None:
    found = summarize([])
    known = {"schema_version": 1, "data": {}, "checkpoints": [], "skipped_steps": 0, "starts": 0}
    assert {name: value for name, value in found.items() if value is not None} == known


def test_summary_of_a_run_in_progress(fake_run: Any) -> None:
    fake_run.begin()
    assert summarize(fake_run.events)["status"] == "running"
    assert summarize(fake_run.events)["precision"] == "bf16", "the plan knows it before the model is loaded"
    fake_run.train(1, 3, total=10)
    found = summarize(fake_run.events)
    assert (found["status"], found["steps"], found["total_steps"]) == ("running", 3, 10)
    assert found["seconds"] == pytest.approx(1.5)


def test_errors_before_a_restart_are_not_reported(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.train(1, 3, total=10)
    fake_run.emit("error", error="WorkerError", what="Lost.", where=None, fix=None, exit_code=70)
    assert summarize(fake_run.events)["error"]["what"] == "Lost."
    fake_run.emit("run.restarted", message="Rank 1 was killed. The run goes on.", step=2, world_size=2)
    assert summarize(fake_run.events)["error"] is None
    assert summarize(fake_run.events)["status"] == "running"


def test_fallback_is_recorded_until_the_next_restart(fake_run: Any) -> None:
    fake_run.begin()
    reason = "rank 1 cannot use its device: it fell off the bus"
    fake_run.emit("run.fallback", message=f"one process goes on: {reason}", reason=reason, planned_world_size=2)
    fake_run.emit("warning", message="something else")
    assert summarize(fake_run.events)["fallback_reason"] == reason
    fake_run.emit("run.restarted", message="Rank 0 was killed. The run goes on.", step=2, world_size=2)
    assert summarize(fake_run.events)["fallback_reason"] is None


def test_changing_the_system_clock_does_not_change_the_duration(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.train(1, 3, total=10)
    fake_run.clock_offset = 86_400.0
    fake_run.step(4, 10)
    fake_run.clock_offset = -86_400.0
    fake_run.step(5, 10)
    assert summarize(fake_run.events)["seconds"] == pytest.approx(2.5)


def test_steps_repeated_after_a_resume_count_once(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.train(1, 60, total=100, eval_every=20)
    fake_run.emit("verdict", step=55, action="skip", cause="inf in the gradient")
    fake_run.save(40)
    fake_run.now += 10_000  # the host was off
    fake_run.begin()
    fake_run.train(41, 50, total=100, pace=1.0)
    fake_run.emit("run.finished", status="stopped", seconds=1.0)
    found, past = summarize(fake_run.events), history(fake_run.events)
    assert (found["steps"], found["starts"], found["status"]) == (50, 2, "stopped")
    assert list(past.steps) == list(range(1, 51))
    assert found["tokens"] == 50 * 32_000
    assert past.steps[45].seconds == 1.0, "the later leg replaces the earlier one"
    assert list(past.evals) == [20, 40], "the evaluation of step 60 belongs to weights that are gone"
    assert found["skipped_steps"] == 0, "so does the step skipped at 55"
    # 60 steps, three evaluations, a checkpoint; then ten steps of a second; not the night between
    assert found["seconds"] == pytest.approx(30 + 1.2 + 0.2 + 10)


def test_a_resume_that_dies_before_its_first_step(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.train(1, 60, total=100)
    fake_run.begin()
    fake_run.train(41, 40, total=100)
    assert summarize(fake_run.events)["steps"] == 40


def test_speed_excludes_the_warm_up_of_every_start(fake_run: Any) -> None:
    fake_run.begin()
    for pace in (60, 30, 9, 1, 1):
        fake_run.step(len(fake_run.events), 10, after=pace)
    fake_run.begin()
    for pace in (60, 30, 9, 2, 2):
        fake_run.step(len(fake_run.events), 10, after=pace)
    assert summarize(fake_run.events)["tokens_per_second"] == pytest.approx(32_000 * (1 + 0.5) / 2)


def test_a_run_shorter_than_the_warm_up_still_has_a_speed(fake_run: Any) -> None:
    fake_run.train(1, 2)
    assert summarize(fake_run.events)["tokens_per_second"] == 64_000


def test_totals_are_sums_over_events(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.emit("train.started", first_step=1, total_steps=25, world_size=1, device="cpu", global_batch_size=4)
    for step in (10, 20):
        fake_run.step(step, 25)
    fake_run.finish(22)
    found = summarize(fake_run.events)
    total = sum(event.tokens for event in fake_run.events if event.kind == "train.step")
    assert (found["steps"], found["tokens"]) == (22, total)


def error(fake_run: Any, kind: str, what: str) -> None:
    fake_run.emit("error", error=kind, what=what, where="rank 1", fix="Lower it.", exit_code=18)


def test_reported_error_is_the_cause_not_a_consequence(fake_run: Any) -> None:
    fake_run.begin()
    fake_run.train(1, 5, total=10)
    fake_run.step(6, 10, loss="nan")
    error(fake_run, "WorkerError", "lost the connection to rank 1")
    error(fake_run, "NonFiniteError", "The loss is nan.")
    assert summarize(fake_run.events)["status"] == "failed", "killed before it could write its end"
    fake_run.emit("run.finished", status="crashed", seconds=3.0)
    found = summarize(fake_run.events)
    assert found["status"] == "crashed"
    assert found["error"] == {
        "class": "NonFiniteError",
        "what": "The loss is nan.",
        "where": "rank 1",
        "fix": "Lower it.",
        "todo": "Lower it.",
        "exit_code": 18,
    }
    assert math.isnan(found["final_loss"])

    fake_run.begin()
    assert summarize(fake_run.events)["error"] is None, "a new start begins with a clean slate"


def test_nonfinite_evaluation_is_never_the_best(fake_run: Any) -> None:
    fake_run.evaluate(10)
    fake_run.emit("eval.done", step=20, loss="nan", perplexity="nan", target_tokens=1, seconds=0.1)
    found = summarize(fake_run.events)
    assert math.isfinite(found["best_eval_loss"])
    assert math.isnan(found["final_eval_loss"])


def test_run_json_is_strict_json_with_the_extra_fields(complete: Any, tmp_path: Path) -> None:
    run_dir = complete.write(tmp_path / "run")
    returned = write_run_json(run_dir, {"exact_match_after": 0.97, "status": "crashed"})
    stored = json.loads((run_dir / "run.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert stored == returned
    assert (stored["exact_match_after"], stored["status"], stored["steps"]) == (0.97, "crashed", 120)
    assert sorted(path.name for path in run_dir.iterdir()) == ["events.jsonl", "run.json"]


def test_unwritable_run_json_raises_storage_error(complete: Any, tmp_path: Path) -> None:
    run_dir = complete.write(tmp_path / "run")
    (run_dir / "run.json").mkdir()
    with pytest.raises(StorageError, match=r"run\.json"):
        write_run_json(run_dir)
    assert sorted(path.name for path in run_dir.iterdir()) == ["events.jsonl", "run.json"]
