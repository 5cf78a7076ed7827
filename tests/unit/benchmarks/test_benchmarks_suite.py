"""Suites: cases are data that the programs they name accept, and no case's end is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pantheraml.cli.main import build_parser, main
from pantheraml.cli.train import config_from
from tests.unit.benchmarks.conftest import Python

ROWS = ["case", "status", "reason", "system", "path", "model", "method", "precision", "checkpointing", "data", "batch",
        "seq", "cache", "tokens_per_second", "peak_gib", "seconds_to_first_step", "loss_first", "loss_last",
        "settings", "seconds", "date", "commit"]  # fmt: skip


def bench(results: Path, *words: str, suite: str = "smoke", status: int = 0) -> dict[str, Any]:
    """Run the smoke suite on the CPU; the record it wrote."""
    places = ["--results", str(results), "--work", str(results.parent / "work"), "--device", "cpu"]
    command = [sys.executable, "-m", "pantheraml.cli.main", "bench", "--suite", suite, *places, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == status, done.stderr
    (path,) = results.glob("*.json")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def statuses(record: dict[str, Any]) -> dict[str, str]:
    return {row["case"]: row["status"] for row in record["results"]}


COMMANDS = """
import json
from pathlib import Path
from suites.h200 import CASES
from suites.run_case import cli_command
own = [case for case in CASES if case.path == "cli"]
print(json.dumps({case.name: cli_command(case, Path("m"), Path("d"), Path("o"), None)[3:] for case in own}))
"""


def test_every_command_line_of_the_suite_is_a_valid_configuration(python: Python) -> None:
    commands = json.loads(python(COMMANDS))
    assert len(commands) >= 10
    for name, words in commands.items():
        config = config_from(build_parser().parse_args(words))
        assert config.train.max_steps is not None, name
        assert config.method.rank == 16, name
        assert config.train.global_batch_size * config.data.seq_len == 8192, name


NAMES = """
import json
from suites.h200 import CASES, TARGETS
wanted = {name for each in TARGETS.comparisons for name in (each.ours, *each.peers)}
print(json.dumps([[case.name for case in CASES], sorted(wanted | {start.case for start in TARGETS.starts})]))
"""


def test_targets_name_cases_of_the_suite(python: Python) -> None:
    cases, wanted = json.loads(python(NAMES))
    assert len(set(cases)) == len(cases)
    assert set(wanted) <= set(cases)


def test_what_is_not_installed_is_skipped_and_what_was_not_asked_for_is_not_run(tmp_path: Path) -> None:
    record = bench(tmp_path / "results", "--only", "unsloth-*", "--commit", "0123abc", status=1)
    assert statuses(record) == {
        "ours-tiny-lora": "not run",
        "ours-tiny-uneven": "not run",
        "hf-tiny-lora": "not run",
        "ours-trl-tiny-lora": "not run",
        "unsloth-tiny-lora": "skipped",
    }
    assert record["results"][-1]["reason"] == "not installed: unsloth, unsloth_zoo, bitsandbytes"
    assert all(list(row) == ROWS for row in record["results"])
    assert record["commit"] == "0123abc"
    assert record["versions"]["unsloth"] is None


def test_no_time_is_a_reason(tmp_path: Path) -> None:
    record = bench(tmp_path / "results", "--minutes", "0.5", status=1)
    assert set(statuses(record).values()) == {"not run"}
    assert record["results"][0]["reason"] == "no time left of 0.5 minutes"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_measured_case_is_kept_when_the_suite_goes_on(tmp_path: Path) -> None:
    first = bench(tmp_path / "results", "--only", "ours-tiny-lora")
    (row,) = [row for row in first["results"] if row["status"] == "measured"]
    assert row["tokens_per_second"] > 0
    assert 0.1 < row["peak_gib"] < 8
    assert 0 < row["seconds_to_first_step"] < row["seconds"]
    assert row["loss_first"] == pytest.approx(6.24, abs=0.1), "about log(512): random weights"
    again = bench(tmp_path / "results", "--resume", "--only", "ours-tiny-lora", "--only", "unsloth-*", status=1)
    assert again["results"][0] == row
    assert statuses(again)["unsloth-tiny-lora"] == "skipped"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_of_others_is_measured_the_same_way(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    record = bench(tmp_path / "results", "--only", "hf-tiny-lora")
    row = next(row for row in record["results"] if row["case"] == "hf-tiny-lora")
    assert row["tokens_per_second"] > 0
    assert row["loss_first"] == pytest.approx(6.24, abs=0.1)
    assert row["peak_gib"] is None, "only a GPU tells"


ENDS = """
import dataclasses, json
from pathlib import Path
from suites.run_case import Workshop, run_case
from suites.smoke import CASES
workshop = Workshop(Path(sys.argv[1]), "cpu")
refused = dataclasses.replace(CASES[0], settings={"train.no_such_key": "1"})
slow = dataclasses.replace(CASES[0], minutes=0.0005)
print(json.dumps([run_case(case, workshop, None) for case in (refused, slow)]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_failures_and_timeouts_are_results(python: Python, tmp_path: Path) -> None:
    refused, slow = json.loads(python(ENDS, str(tmp_path)))
    assert refused["status"] == "failed"
    assert refused["reason"].startswith("exit code 2: ConfigError:")
    assert refused["tokens_per_second"] is None
    assert slow["status"] == "timed out"
    assert slow["reason"] == "stopped after 0 s"


def test_listing_runs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "h200", "--list", "--only", "*-1b-full*"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["ours-1b-full", "0.7", "min"]
    assert lines[-1].startswith(f"{len(lines) - 1} cases, about")


def test_unknown_names_are_refused_with_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "h2000", "--list"]) == 2
    assert "known: h200, smoke" in capfd.readouterr().err
    assert main(["bench", "--suite", "smoke", "--only", "nothing"]) == 2
    assert "no case of smoke is named nothing" in capfd.readouterr().err


COMPARED = """
import json
from suites.comparison import Comparison, StartLimit, Targets
targets = Targets(
    comparisons=(
        Comparison("speed and memory", "ours", ("slow", "fast"), 1.6, 0.95),
        Comparison("memory only", "ours", ("slow",), None, 0.5),
        Comparison("not there", "lost", ("fast",), 1.0, None),
    ),
    starts=(StartLimit("cold", "ours", 60), StartLimit("warm", "lost", 30)),
)
print(targets.markdown([{"results": json.loads(sys.argv[1])}]))
"""


def test_ratios_are_to_the_fastest_and_to_the_leanest(python: Python) -> None:
    figures = {"ours": (1600, 40, 61), "slow": (800, 50, 1), "fast": (1000, 80, 1), "lost": (1, 1, 1)}
    rows = [
        {"case": name, "status": "failed" if name == "lost" else "measured", "tokens_per_second": speed,
         "peak_gib": peak, "seconds_to_first_step": start}
        for name, (speed, peak, start) in figures.items()
    ]  # fmt: skip
    lines = [line for line in python(COMPARED, json.dumps(rows)).splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        "| speed and memory | ours | 1,600 | 1,000 (fast) | 1.60 | at least 1.6: yes"
        " | 40.0 GiB | 50.0 GiB (slow) | 0.80 | at most 0.95: yes |",
        "| memory only | ours | 1,600 | – | – | – | 40.0 GiB | 50.0 GiB (slow) | 0.80 | at most 0.5: no |",
        "| not there | lost | not measured | 1,000 (fast) | – | at least 1 | not measured | – | – | – |",
        "| start to first step | our case | measured | limit |",
        "| cold | ours | 61 s | 60 s: no |",
        "| warm | lost | not measured | 30 s |",
    ]
