"""Replay of an incident: the recorded finding is reproduced, or reported as not reproduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.base.errors import NonFiniteError, RunDirectoryError, TrainingError
from pantheraml.cli.main import main
from pantheraml.parallel.process_group import World
from pantheraml.specs.consent import Consent
from pantheraml.specs.faults import fail_at
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import ReplayRequest, ReplayResult
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.replay import replay_incident
from tests import toy
from tests.harness import make_plan, make_run, merged, train_here, values


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    rows = toy.arithmetic(24)
    rows[7]["prompt"] += toy.RARE
    toy.write_jsonl(folder / "data.jsonl", rows)
    toy.write_llama(folder / "model")
    toy.write_poisoned_llama(folder / "poisoned")
    return folder


def config_of(root: Path, model: str, **changes: Any) -> TrainConfig:
    base = {
        "model": {"path": str(root / model)},
        "data": {"path": str(root / "data.jsonl"), "seq_len": 64, "packing": False, "cache_dir": str(root / "cache")},
        "method": {"kind": "lora", "rank": 4, "dropout": 0.2},
        "train": {"global_batch_size": 8, "max_steps": 3, "learning_rate": 5e-3},
        "stability": {"on_nonfinite": "skip"},
    }
    return TrainConfig.model_validate({**merged(base, changes), "device": "cpu"})


def run_of(root: Path, name: str, model: str, **changes: Any) -> tuple[RunDir, Path]:
    """A run with one incident."""
    config = config_of(root, model, **changes)
    run = make_run(root / name, config, make_plan(config, micro=2))
    (incident,) = values(train_here(run), "incident", "path")
    return run, run.path / incident


def replay(run: RunDir, incident: Path) -> ReplayResult:
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    return replay_incident(
        ReplayRequest(run_dir=run.path, consent=Consent(), incident=incident, plan=run.plan()), alone
    )


@pytest.fixture(scope="module")
def persistent(root: Path) -> tuple[RunDir, Path]:
    return run_of(root, "persistent", "poisoned")


def test_the_recorded_finding_is_reproduced(persistent: tuple[RunDir, Path]) -> None:
    result = replay(*persistent)
    assert result.same
    assert result.found == result.recorded
    assert "embed_tokens.weight" in result.found
    assert result.weights == "the weights of that step"


def test_a_different_finding_is_reported(persistent: tuple[RunDir, Path]) -> None:
    run, path = persistent
    incident = json.loads(path.read_text())
    incident["findings"][0]["module"] = "somewhere else"
    elsewhere = path.with_name("elsewhere.json")
    elsewhere.write_text(json.dumps(incident))
    assert not replay(run, elsewhere).same


def test_full_fine_tuning_is_replayed_from_available_weights(root: Path) -> None:
    config = config_of(root, "poisoned", method={"kind": "full"}, stability={"on_nonfinite": "stop"})
    run = make_run(root / "full", config, make_plan(config, micro=2))
    with pytest.raises(NonFiniteError):
        train_here(run)
    (incident,) = run.incidents.glob("*.json")
    assert json.loads(incident.read_text())["kept"] is None
    result = replay(run, incident)
    assert result.same
    assert result.weights == "the initial weights of the run"


def test_a_transient_fault_is_not_reproduced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_FAULTS", fail_at(0, 2, "nan"))
    run, incident = run_of(root, "transient", "model")
    result = replay(run, incident)
    assert result.same
    assert "transient" in result.recorded
    losses = {event["step"]: event["loss"] for event in events_of(run)}
    assert float(result.loss) == pytest.approx(losses[2], rel=1e-5), "weights, samples and dropout are those of then"


def test_a_persistent_spike_is_reproduced(root: Path) -> None:
    # a loss that is above its mean by anything at all
    stability = {"on_spike": "stop", "spike_warmup_steps": 2, "spike_zscore": 1e-9}
    config = config_of(root, "model", stability=stability, train={"learning_rate": 1e-6, "max_steps": 8})
    run = make_run(root / "spike", config, make_plan(config, micro=2))
    with pytest.raises(TrainingError, match="standard deviations above"):
        train_here(run)
    (incident,) = run.incidents.glob("*.json")
    result = replay(run, incident)
    assert result.same
    assert result.found == result.recorded
    content = json.loads(incident.read_text())
    content["numbers"]["grad_norm"] *= 1.2
    elsewhere = incident.with_name("elsewhere.json")
    elsewhere.write_text(json.dumps(content))
    assert not replay(run, elsewhere).same


def events_of(run: RunDir) -> list[dict[str, Any]]:
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "train.step"]


def test_the_command_replays_in_a_worker(persistent: tuple[RunDir, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, incident = persistent
    assert main(["replay", str(incident), "--json"]) == 0
    result = ReplayResult.model_validate_json(capsys.readouterr().out)
    assert result.same
    elsewhere = incident.with_name("elsewhere.json")
    assert main(["replay", str(elsewhere)]) == 8
    assert main(["replay", str(incident.with_name("none.json"))]) == RunDirectoryError.exit_code
