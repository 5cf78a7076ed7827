"""Training, generating, exporting and resuming through the command line."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import psutil
import pytest

from pantheraml.base.errors import PreemptedError
from pantheraml.specs.faults import fail_at
from pantheraml.specs.run_dir import RunDir
from tests.e2e.conftest import PATIENCE_SECONDS, Playground, result_of, workers_of
from tests.event_log import raw_events


def run_json(playground: Playground, run: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((playground.root / run / "run.json").read_text())
    return found


def losses(playground: Playground, run: str) -> dict[int, float]:
    events = raw_events(playground.root / run)
    return {event["step"]: event["loss"] for event in events if event["kind"] == "train.step"}


@pytest.mark.seed("S0-007", "S0-121")
def test_a_config_file_trains_and_the_result_speaks_and_exports(playground: Playground) -> None:
    config = playground.root / "first.yaml"
    config.write_text(
        f"model:\n  path: {playground.model}\n"
        f"data:\n  path: {playground.data}\n  seq_len: 64\n  eval_fraction: 0.1\n"
        "train:\n  max_steps: 6\n  global_batch_size: 4\n  eval_every_steps: 3\n  learning_rate: 5e-3\n"
        "checkpoint:\n  every_steps: 2\n  keep: 2\n"
    )
    ended = playground("train", "first.yaml", "--nproc", "2", "--device", "cpu")
    assert ended.code == 0, ended
    folder = playground.root / "runs" / "first"
    present = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "plan.json", "events.jsonl", "run.json", "checkpoints", "adapter", "report.html"} <= present
    assert "stop-requested" not in present
    result = run_json(playground, "runs/first")
    assert result["status"] == "succeeded"
    assert result["steps"] == 6
    assert result["world_size"] == 2
    assert float(str(result["final_eval_loss"])) < float(str(result["first_loss"]))
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000006"]

    prompts = [word for number in range(5) for word in ("--prompt", f"{number}+{number}=")]
    told = ["generate", "runs/first", *prompts, "--max-new-tokens", "4", "--device", "cpu", "--json"]
    alone, ranks = playground(*told), playground(*told, "--nproc", "2")
    assert (alone.code, ranks.code) == (0, 0), ranks
    assert [json.loads(line)["prompt"] for line in alone.out.splitlines()] == prompts[1::2]
    assert ranks.out == alone.out

    exported = playground("export", "runs/first", "--merge", "--output", "merged")
    assert exported.code == 0, exported
    assert (playground.root / "merged" / "config.json").exists()
    again = playground("export", "runs/first", "--merge", "--output", "merged")
    assert again.code != 0
    assert "Traceback" not in again.err

    before = (folder / "config.yaml").read_text()
    other = playground("train", "first.yaml", "--device", "cpu", "--resume", "--set", "train.seed=3")
    assert other.code == 7
    assert "train.seed was 0, is 3" in other.err
    assert (folder / "config.yaml").read_text() == before, "a refused change changes nothing"

    refused = playground("train", "first.yaml", "--device", "cpu")
    assert refused.code == 9
    assert "--resume" in refused.err
    assert "--overwrite" in refused.err


def test_interrupt_saves_and_resume_continues_as_if_nothing_had_happened(playground: Playground) -> None:
    settings = ["--set", "train.max_steps=40", "--set", "method.dropout=0.1", "--set", "train.seed=3", "--nproc", "2"]
    assert playground.train("runs/straight", *settings).code == 0
    slow = ",".join(fail_at(0, step, "slow") for step in range(2, 40))  # or it may be over before it is interrupted
    tested = replace(playground, environment={**playground.environment, "PANTHERAML_FAULTS": slow})
    process = tested.start_training("runs/broken", *settings)
    playground.wait_for_steps("runs/broken")
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    ended = result_of(process)
    assert ended.code == 130, ended
    assert "pantheraml resume" in ended.err
    assert "the checkpoint of step" in ended.err
    assert not [worker for worker in workers if worker.is_running()]
    stopped = run_json(playground, "runs/broken")
    assert stopped["status"] == "stopped"
    assert 0 < int(str(stopped["steps"])) < 40
    resumed = playground("resume", "runs/broken")
    assert resumed.code == 0, resumed
    assert losses(playground, "runs/broken") == losses(playground, "runs/straight")
    straight, broken = (
        playground.root / "runs" / name / "adapter/adapter_model.safetensors" for name in ("straight", "broken")
    )
    assert straight.read_bytes() == broken.read_bytes()


@pytest.mark.extended
def test_a_scheduler_may_stop_a_single_worker(playground: Playground) -> None:
    process = playground.start_training("runs/scheduled", "--nproc", "2", "--set", "train.max_steps=100000")
    playground.wait_for_steps("runs/scheduled")
    workers_of(process.pid)[1].send_signal(signal.SIGUSR1)
    ended = result_of(process)
    assert ended.code == PreemptedError.exit_code, ended
    assert "Stopped by SIGUSR1" in ended.err, "which the worker tells the parent"
    assert "Traceback" not in ended.err
    assert run_json(playground, "runs/scheduled")["status"] == "preempted"
    assert list((playground.root / "runs/scheduled/checkpoints").iterdir())


@pytest.mark.extended
def test_workers_of_a_parent_that_was_killed_save_and_end(playground: Playground) -> None:
    endless = ["--set", "train.max_steps=100000", "--set", "train.schedule=constant"]
    process = playground.start_training("runs/orphan", "--nproc", "2", *endless)
    playground.wait_for_steps("runs/orphan")
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 3
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    _gone, alive = psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
    assert not alive
    saved = RunDir(playground.root / "runs/orphan").last_checkpoint()
    assert saved is not None, "the orphans saved before they left"
    resumed = playground("resume", "runs/orphan", "--set", f"train.max_steps={saved + 1}")
    assert resumed.code == 0, resumed
    assert run_json(playground, "runs/orphan")["steps"] == saved + 1


def test_full_training_writes_a_plain_model(playground: Playground) -> None:
    ended = playground.train("runs/full", "--method", "full", "--set", "train.max_steps=2", "--json")
    assert ended.code == 0, ended
    assert json.loads(ended.out)["output"] == {"form": "model", "path": "model"}
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(playground.root / "runs/full/model")


def test_early_stopping_and_best_weights(playground: Playground) -> None:
    settings = [
        "train.max_steps=60",
        "data.eval_fraction=0.2",
        "train.eval_every_steps=2",
        "train.early_stopping_patience=2",
        "train.learning_rate=0.3",
        "checkpoint.final=best",
        "train.schedule=constant",
        "train.max_grad_norm=0",
    ]
    ended = playground.train("runs/early", "--json", *(word for setting in settings for word in ("--set", setting)))
    assert ended.code == 0, ended
    summary = json.loads(ended.out)
    assert summary["steps"] < 60, "such a learning rate never gets better for long"
    events = raw_events(playground.root / "runs/early")
    assert next(e for e in events if e["kind"] == "train.finished")["stopped_by"] == "early_stopping"
    best = min((e for e in events if e["kind"] == "eval.done"), key=lambda e: e["loss"])
    assert f"step-{best['step']:08d}" in {p.name for p in (playground.root / "runs/early/checkpoints").iterdir()}
    assert any(e["kind"] == "notice" and f"step {best['step']}" in e["message"] for e in events)


def test_a_plan_is_made_and_replayed(playground: Playground) -> None:
    settings = ["--device", "cpu", "--set", "train.max_steps=2", "--set", "data.seq_len=64"]
    planned = playground("plan", "--model", playground.model, "--data", playground.data, *settings, "--json")
    assert planned.code == 0, planned
    (playground.root / "plan.json").write_text(planned.out)
    ended = playground("train", "--plan", "plan.json", "--output", "runs/replayed")
    assert ended.code == 0, ended
    plan = json.loads((playground.root / "runs/replayed/plan.json").read_text())
    assert plan == json.loads(planned.out) | {"made_for": None}
    refused = playground("train", "--plan", "plan.json", "--output", "runs/other", "--set", "data.seq_len=32")
    assert refused.code == 2
    assert "another value of data.seq_len" in refused.err
    assert not (playground.root / "runs/other").exists()
