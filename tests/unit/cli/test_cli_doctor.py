"""`pantheraml doctor` on a terminal: every check is a line, with its fix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pantheraml.base.errors import LaunchError
from pantheraml.cli.main import main
from pantheraml.runs import doctor
from pantheraml.specs.diagnosis import Check, failed, ok, skipped, warning

CHECKS = (
    ok("Python", "3.11.7", version="3.11.7"),
    warning("driver", "no NVIDIA driver", "Install one."),
    skipped("GPUs", "none"),
    failed("collective", LaunchError("1 of 2 ranks joined", fix="Look\x1b[31m at the log.")),
)


def found(*checks: Check) -> Any:
    def examine(doing: Any) -> Iterator[Check]:
        for check in checks:
            with doing("working"):
                pass
            yield check

    return examine


def test_lines_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", found(*CHECKS))
    assert main(["doctor"]) == LaunchError.exit_code
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        "ok    Python           3.11.7",
        "warn  driver           no NVIDIA driver",
        "                       fix: Install one.",
        "-     GPUs             none",
        "FAIL  collective       1 of 2 ranks joined",
        "                       fix: Look\\x1b[31m at the log.",
        "1 problem, 1 warning.",
    ]


def test_warnings_do_not_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", found(*CHECKS[:3]))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "This host can train, 1 warning."


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", found(*CHECKS))
    assert main(["doctor", "--json"]) == LaunchError.exit_code
    answer = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == LaunchError.exit_code
    assert [check["status"] for check in answer["checks"]] == ["ok", "warning", "skipped", "failed"]
    assert answer["checks"][0]["values"] == {"version": "3.11.7"}
    assert answer["checks"][3]["error"] == "LaunchError"


def test_a_rank_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 2
    assert "Run it once per host" in capsys.readouterr().err
