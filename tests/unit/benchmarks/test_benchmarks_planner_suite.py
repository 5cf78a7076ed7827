"""The suite that the planner's predictions are compared with: what it covers, and how its rows are shown."""

from __future__ import annotations

import json
from pathlib import Path

from pantheraml.cli.main import build_parser
from pantheraml.cli.train import config_from
from tests.unit.benchmarks.conftest import Python

CASES = """
import dataclasses, json
from pathlib import Path
import planner_page
from suites import h200_planner
from suites.run_case import cli_command, cli_settings
found = []
for case in (*h200_planner.CHOSEN, *h200_planner.RANDOM):
    row = dataclasses.asdict(case)
    run = planner_page.Measured(case.name, case.model, cli_settings(row), 1.0, "2030-01-01", "x", "pantheraml")
    predicted = planner_page.compare(run)
    command = cli_command(case, Path("m"), Path("d"), Path("o"), None)[3:]
    drawn = case.name in h200_planner.RANDOM_NAMES
    more = {"predicted_gib": predicted.predicted_gib, "drawn": drawn, "settings": dict(case.settings)}
    found.append(row | more | {"command": command})
print(json.dumps(found))
"""

DRAWN = [
    "plan-1b-lora-fp8-2x4096",
    "plan-1b-full-bf16-adamw-1x16384-full",
    "plan-qwen3-1.7b-full-bf16-adamw-1x8192-full",
    "plan-qwen3-1.7b-lora-fp8-1x8192-offload",
    "plan-qwen3-1.7b-qlora-nf4-16x512",
    "plan-3b-full-fp8-adamw_bf16-4x2048-full",
    "plan-qwen3-4b-lora-fp8-8x1024-selective",
    "plan-qwen3-4b-full-fp8-adamw_bf16-1x16384-full",
    "plan-qwen3-4b-qlora-nf4-2x2048",
    "plan-qwen3-4b-full-bf16-adamw_bf16-16x512-padded",
    "plan-8b-lora-bf16-2x4096-selective",
    "plan-8b-lora-bf16-2x2048",
    "plan-8b-lora-fp8-2x4096-selective",
    "plan-qwen3-8b-lora-bf16-1x2048-offload",
    "plan-qwen3-8b-qlora-nf4-1x32768-offload",
    "plan-1b-lora-fp8-1x32768",
]
"""Drawn once, before any of them was measured; another draw would be a choice."""


def test_the_settings_span_what_is_promised(python: Python) -> None:
    cases = json.loads(python(CASES))
    assert len({case["name"] for case in cases}) == len(cases) == 2 * len(DRAWN) >= 24
    assert {case["name"] for case in cases if case["drawn"]} == set(DRAWN)
    for name, wanted in {
        "model": {"1b", "3b", "8b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b"},
        "method": {"lora", "qlora", "full"},
        "precision": {"bf16", "fp8", "nf4"},
        "checkpointing": {"none", "selective", "full", "offload"},
    }.items():
        for drawn in (False, True):
            values = {case[name] for case in cases if case["drawn"] is drawn}
            assert values <= wanted
            assert drawn or values == wanted, name
    lengths, batches = {case["seq"] for case in cases}, {case["batch"] for case in cases}
    assert (min(lengths), max(lengths), min(batches), max(batches)) == (512, 32_768, 1, 16)
    assert {case["settings"].get("data.packing") for case in cases} == {None, "false"}
    for case in cases:
        config = config_from(build_parser().parse_args(case["command"]))
        assert config.train.micro_batch_size == config.train.global_batch_size == case["batch"], case["name"]
        assert config.data.packing is ("data.packing" not in case["settings"])
        assert 0 < case["predicted_gib"] < 0.9 * 139, case["name"]


SECTION = "import json, planner_page\nprint(planner_page.section(json.loads(sys.argv[1])))"
ROW = {
    "case": "plan-8b-lora-bf16-2x2048", "system": "pantheraml", "path": "cli", "trainer": "sft", "model": "8b",
    "method": "lora", "precision": "bf16", "checkpointing": "none", "batch": 2, "seq": 2048, "settings": {},
    "peak_gib": 30.0, "reserved_gib": 32.0, "device_gib": 33.5, "probe_gib": 29.9, "date": "2030-01-02",
    "commit": "0123456789",
}  # fmt: skip


def test_its_rows_are_shown_with_all_three_memories(python: Python) -> None:
    other = ROW | {"case": "plan-8b-lora-fp8-uneven-padded-expandable", "probe_gib": None}
    record = {"benchmark": "h200-planner", "date": "2030-01-02", "results": [ROW, other]}
    lines = python(SECTION, json.dumps([record])).splitlines()
    (compared,) = [line for line in lines if line.startswith("| plan-8b") and "backward" in line]
    assert compared.endswith("| drawn at random |")
    assert "| 30.00 | 29." in compared
    more, uneven = [line for line in lines if line.startswith("| plan-8b") and "backward" not in line]
    assert more.startswith("| plan-8b-lora-bf16-2x2048 | 30.00 | 29.90 | 32.00 | 32.")
    assert "| 33.50 | 33." in more
    assert uneven.startswith("| plan-8b-lora-fp8-uneven-padded-expandable | 30.00 | - | 32.00 | ")
    (told,) = [line for line in lines if line.startswith("**Beyond the allocated peak**")]
    assert "Reserved: median error 0." in told
    assert "Driver: median error 0." in told
    assert "not recorded" not in "".join(lines)
    assert "Allocated, as measured after two steps: median error 0.33%, worst 0.33%." in told


ENVIRONMENT = """
import json
from pathlib import Path
from suites.h200_planner import CASES
from suites.workshop import SuiteFolder
folder = SuiteFolder(Path(sys.argv[1]))
print(json.dumps({case.name: folder.environment(case).get("PYTORCH_ALLOC_CONF") for case in CASES}))
"""


def test_four_settings_run_with_both_kinds_of_segments(python: Python, tmp_path: Path) -> None:
    given = json.loads(python(ENVIRONMENT, str(tmp_path)))
    growing = [name for name, value in given.items() if value == "expandable_segments:True"]
    assert len(growing) == 4
    assert all(given[name.removesuffix("-expandable")] is None for name in growing)
