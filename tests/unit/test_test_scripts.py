"""tests/test_multi_gpu.py and tests/run_all_tests.py: what they start, and the exit code they end with."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import run_all_tests, test_multi_gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.seed("S0-022", "S0-023", "S0-024", "S0-025", "S0-026", "S0-079", "S0-080", "S0-081", "S0-082", "S0-083")
def test_the_multi_gpu_suite_is_there() -> None:
    files = [file for group in test_multi_gpu.SUITE.values() for file in group]
    assert len(files) == len(set(files))
    for file in files:
        assert re.search(r"^def test_", (ROOT / file).read_text(), re.MULTILINE), file


@pytest.mark.extended
@pytest.mark.seed("S0-078")
def test_it_runs_from_anywhere_with_the_exit_code_of_pytest(tmp_path: Path) -> None:
    """In a process of its own; that the suite passes is shown by its files, which `make test-all` runs."""
    command = [sys.executable, str(ROOT / "tests/test_multi_gpu.py"), "--no-such-option"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --no-such-option" in ended.stderr


def test_it_passes_every_file_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(test_multi_gpu.pytest, "main", lambda arguments: started.append(arguments) or 1)
    assert test_multi_gpu.main(["-x"]) == 1
    files = [str(ROOT / file) for group in test_multi_gpu.SUITE.values() for file in group]
    assert started[0][2:] == ["-x", *files]


def test_collecting_it_runs_nothing_twice() -> None:
    for module in (test_multi_gpu, run_all_tests):
        assert not [name for name in vars(module) if name.lower().startswith("test")]


@pytest.mark.seed("S3:181", "S3:187", "S3-051", "S3-074", "S3-075")
@pytest.mark.parametrize(
    ("arguments", "codes", "markers", "expected"),
    [
        (["--quick", "-x"], [0], ["not extended"], 0),
        ([], [0, 0, 0], ["not extended", "extended", None], 0),
        ([], [0, 1], ["not extended", "extended"], 1),
        (["--quick"], [5], ["not extended"], 5),
    ],
)
def test_all_tests_or_the_quick_ones(
    arguments: list[str], codes: list[int], markers: list[str | None], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], *, env: dict[str, str], **others: Any) -> subprocess.CompletedProcess[str]:
        started.append((command, env))
        return subprocess.CompletedProcess(command, codes[len(started) - 1])

    monkeypatch.setattr(run_all_tests.subprocess, "run", run)
    assert run_all_tests.main(arguments) == expected
    assert [command[command.index("-m", 3) + 1] if "-m" in command[3:] else None for command, _ in started] == markers
    assert [command[-1] == "-x" for command, _ in started] == ["-x" in arguments] * len(started)
    interpreted = ["tests/interpreter" in command for command, _ in started]
    assert interpreted == [env.get("TRITON_INTERPRET") == "1" for _, env in started]


def test_the_parts_are_those_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert " ".join(run_all_tests.SPREAD) in makefile
    for own, _ in run_all_tests.parts(quick=False):
        assert own[-1] in makefile
    for name, value in run_all_tests.ONE_THREAD.items():
        assert f"{name}={value}" in makefile
