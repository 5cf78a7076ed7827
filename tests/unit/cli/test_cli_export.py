"""What the worker says while it exports or generates reaches the person, though nothing is drawn meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.events import EventWriter
from pantheraml.cli import execute
from pantheraml.cli.main import main
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, MethodConfig, ModelConfig, TrainConfig
from tests.harness import make_plan


def finished(path: Path, kind: Any) -> RunDir:
    config = TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), method=MethodConfig(kind=kind))
    run = RunDir(path)
    run.mark()
    run.write_config(config)
    run.write_plan(make_plan(config))
    (path / ("model" if kind == "full" else "adapter")).mkdir()
    return run


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that were made; the worker is one that answers with a notice."""
    requests: list[Any] = []

    def answer_at_once(task: str, request: Any, *, answer: Any, **others: Any) -> Any:
        requests.append(request)
        with EventWriter(tmp_path) as emit:
            emit("notice", message="something is not as you may think")
        (tmp_path / "answers.jsonl").write_text(json.dumps({"completion": "x"}) + "\n")
        return answer(tmp_path)

    monkeypatch.setattr(execute, "run_request", answer_at_once)
    return requests


def test_notices_are_printed(tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = finished(tmp_path / "run", "qlora")
    command = ["export", str(run.path), "--merge", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Something is not as you may think."
    assert main([*command, "--base", "plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notices"][0].startswith("something")
    assert [request.base for request in asked] == ["trained", "plain"]
    assert main(["generate", str(run.path), "--prompt", "x", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "something is not as you may think" in captured.err
    assert captured.out == "x\n"


def test_a_whole_model_has_no_base_to_choose(
    tmp_path: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished(tmp_path / "run", "full")
    assert main(["export", str(run.path), "--output", str(tmp_path / "out"), "--base", "plain"]) == 2
    assert "this run trained every weight" in capsys.readouterr().err
    assert not asked
