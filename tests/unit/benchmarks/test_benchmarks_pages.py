"""docs/performance.md: figures come from result files alone, and every ablation is described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.benchmarks.conftest import Python

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"

ABLATION: dict[str, Any] = {
    "benchmark": "ablation",
    "date": "2030-01-02T03:04:05+00:00",
    "hardware": {"gpus": ["A GPU"], "cpu": None},
    "results": [
        {
            "trick": "loss",
            "off_tokens_per_second": 10000,
            "on_tokens_per_second": 12500,
            "off_peak_gib": 60.0,
            "on_peak_gib": 48.5,
        },
        {"trick": "offload", "off_peak_gib": 40.0, "on_peak_gib": 12.0},
    ],
}


@pytest.mark.seed("C13")
def test_page_is_up_to_date(python: Python) -> None:
    generated = python("import run; sys.stdout.write(run.performance_page.page(run.records()))")
    assert PAGE.read_text(encoding="utf-8") == generated, "run `python benchmarks/run.py --table`"


RENDER = "import json, performance_page\nprint(performance_page.page(json.loads(sys.argv[1])))"


def test_newest_ablation_is_shown(python: Python) -> None:
    newer = {**ABLATION, "date": "2031-01-01", "results": [{**ABLATION["results"][0], "on_tokens_per_second": 13000}]}
    lines = python(RENDER, json.dumps([newer, ABLATION])).splitlines()
    assert (
        "Measured (A GPU, 2031-01-01): **10,000 tokens/s without, 13,000 with (+30.0%)**;"
        " **60.0 GiB without, 48.5 with (-11.5 GiB)**." in lines
    )
    assert "Measured (A GPU, 2030-01-02): **40.0 GiB without, 12.0 with (-28.0 GiB)**." in lines
    assert "Not measured yet." in lines


def test_ablation_without_a_description_is_an_error(python: Python) -> None:
    unknown = {**ABLATION, "results": [{"trick": "magic"}]}
    code = (
        "import json, performance_page\n"
        "try: performance_page.page(json.loads(sys.argv[1]))\n"
        "except ValueError as err: print(err)"
    )
    assert "magic" in python(code, json.dumps([unknown]))


def test_the_ratios_in_the_readme_are_those_of_the_result_files(python: Python) -> None:
    readme = PAGE.parents[1] / "README.md"
    generated = python(
        "import run; sys.stdout.write(run.readme_table.with_ratios(run.README.read_text(), run.records()))"
    )
    assert readme.read_text(encoding="utf-8") == generated, "run `python benchmarks/run.py --table`"
    assert readme.read_text().count("**1.") >= 3


SERVICE = PAGE.with_name("service.md")


def test_the_figures_of_the_service_are_those_of_the_newest_results(python: Python) -> None:
    generated = python(
        "import run; sys.stdout.write(run.service_section.with_section(run.SERVICE.read_text(), run.records()))"
    )
    assert SERVICE.read_text(encoding="utf-8") == generated, "run `python benchmarks/run.py --table`"


def test_the_service_bears_what_it_promises(python: Python) -> None:
    code = "import json, run; print(json.dumps({each['benchmark']: each for each in run.records()}))"
    newest = json.loads(python(code))
    load, start = newest["service_load"], newest["service_start"]
    asked = [load["parameters"][name] for name in ("jobs", "readers", "reads_per_second")]
    assert asked == [2000, 200, 500]
    assert load["results"]["worst_p99_seconds"] <= 0.1
    assert load["results"]["training_share"] >= 0.95
    assert load["results"]["failed"] == load["results"]["broken_readers"] == 0
    assert start["results"]["start_seconds"] <= 2.0
    assert start["parameters"]["mebibytes"] >= 1000
    assert start["results"]["memory_peak_bytes"] - start["results"]["memory_before_bytes"] < 16 << 20
    assert start["results"]["broken_leaves_bytes"] == 0


PLANNER = PAGE.with_name("planner.md")


def test_the_planner_page_is_up_to_date(python: Python) -> None:
    generated = python(
        "import run; sys.stdout.write(run.planner_page.with_section(run.PLANNER.read_text(), run.records()))"
    )
    assert PLANNER.read_text(encoding="utf-8") == generated, "run `python benchmarks/run.py --table`"


def test_recorded_runs_are_predicted_within_the_targets(python: Python) -> None:
    """Allocated peak, median 2 % and worst 6 %; more settings are to be recorded."""
    code = (
        "import json, planner_page, run\n"
        "found = map(planner_page.compare, planner_page.measured_runs(run.records()))\n"
        "ours = [each for each in found if each.run.loop == 'pantheraml' and each.error is not None]\n"
        "print(json.dumps([[each.developed, each.error] for each in ours]))"
    )
    errors = sorted(abs(error) for developed, error in json.loads(python(code)) if not developed)
    assert len(errors) >= 12
    assert errors[len(errors) // 2] <= 0.02
    assert errors[-1] <= 0.06


def test_runs_of_unknown_families_are_listed_without_a_prediction(python: Python) -> None:
    code = (
        "import json, planner_page\n"
        "from inputs import SHAPES\n"
        "SHAPES['new'] = {**SHAPES['tiny'], 'family': 'a-new-family'}\n"
        "print(planner_page.section(json.loads(sys.argv[1])))"
    )
    row = {
        "case": "ours-new", "system": "pantheraml", "path": "cli", "trainer": "sft", "model": "new", "method": "lora",
        "precision": "fp8", "checkpointing": "none", "batch": 4, "seq": 2048, "settings": {}, "peak_gib": 1.5,
        "date": "2030-01-02", "commit": "0123456789",
    }  # fmt: skip
    record = {
        "benchmark": "h200",
        "date": "2030-01-02",
        "results": [row, {**row, "model": "tiny", "case": "ours-tiny"}],
    }
    lines = python(code, json.dumps([record])).splitlines()
    assert any(line.startswith("| ours-new |") and "not predicted" in line and "a-new-family" in line for line in lines)
    assert any(line.startswith("| ours-tiny |") and line.endswith("| test |") for line in lines)
