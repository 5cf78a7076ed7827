"""Notices of the export and generate workers reach the user, although no progress bar is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.event_stream import EventWriter
from pantheraml.base.events import Notice
from pantheraml.cli.main import main
from pantheraml.runs import tasks
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import DataConfig, MethodConfig, ModelConfig, TrainConfig
from tests.harness import make_plan


def finished_run(path: Path, kind: Any) -> RunDir:
    config = TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"), method=MethodConfig(kind=kind))
    run = RunDir(path)
    run.mark()
    run.write_config(config)
    run.write_plan(make_plan(config))
    (path / ("model" if kind == "full" else "adapter")).mkdir()
    return run


@pytest.fixture
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Requests to a fake worker, which answers with a notice."""
    made: list[Any] = []

    def fake_request(task: str, request: Any, *, answer: Any, **others: Any) -> Any:
        made.append(request)
        with EventWriter(tmp_path) as emit:
            emit(Notice(message="something is unusual"))
        (tmp_path / "answers-0.jsonl").write_text(json.dumps({"completion": "x"}) + "\n")
        return answer(tmp_path)

    monkeypatch.setattr(tasks, "run_request", fake_request)
    return made


def test_notices_are_printed(tmp_path: Path, requests: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path / "run", "qlora")
    command = ["export", str(run.path), "--merge", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == "Something is unusual."
    assert main([*command, "--base", "plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notices"][0].startswith("something")
    assert [request.base for request in requests] == ["trained", "plain"]
    assert main(["generate", str(run.path), "--prompt", "x", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert "something is unusual" in captured.err
    assert captured.out == "x\n"


def test_base_option_is_rejected_for_a_full_fine_tune(
    tmp_path: Path, requests: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path / "run", "full")
    assert main(["export", str(run.path), "--output", str(tmp_path / "out"), "--base", "plain"]) == 2
    assert "this run trained every weight" in capsys.readouterr().err
    assert not requests
