"""Step times are predicted from kernels; whole steps of the H200 test them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tests.unit.benchmarks.conftest import Python

ROWS = """
import json
from predicted_times import markdown, time_rows
rows = [{"case": row.case, "error": row.error, "used": row.used is not None} for row in time_rows()]
print(json.dumps([rows, markdown()]))
"""


def test_recorded_steps_are_predicted(python: Python) -> None:
    rows, table = json.loads(python(ROWS))
    held_out = [abs(row["error"]) for row in rows if not row["used"]]
    assert len(held_out) >= 20
    assert statistics.median(held_out) <= 0.08
    assert max(held_out) <= 0.20
    assert "ours-8b-lora-uneven" in {row["case"] for row in rows}
    assert table.count("| used for ") == sum(row["used"] for row in rows) == 11
    assert "(target 8 %: reached)" in table


UNPLANNED = """
import json, shutil
from pathlib import Path
import predicted_times
from suites.h200_families import CASES
folder = Path(sys.argv[1])
for name in predicted_times.RESULTS.glob("ablation-*.json"):
    shutil.copy(name, folder)
measured = {"status": "measured", "tokens_per_second": 20_000.0}
rows = [case.row(**measured) for case in CASES]
rows += [row | {"case": row["case"] + "-longest", "tokens_per_second": None} for row in rows[:1]]
(folder / "h200-families-20300101T000000Z.json").write_text(json.dumps({"results": rows}))
predicted_times.RESULTS = folder
print(json.dumps([row.case for row in predicted_times.time_rows()]))
"""


def test_a_suite_with_families_and_lengths_that_have_no_time_is_shown(python: Python, tmp_path: Path) -> None:
    found = json.loads(python(UNPLANNED, str(tmp_path)))
    assert {"ours-qwen3-4b-lora", "ours-granite-8b-lora", "ours-8b-qlora-384k"} <= set(found)
    assert not [case for case in found if "gpt-oss" in case or "olmo3" in case or case.endswith("-longest")]


PLANNER = Path(__file__).parents[3] / "docs" / "planner.md"


def test_the_tables_of_the_planner_page_are_up_to_date(python: Python) -> None:
    code = "import predicted_times, run; sys.stdout.write(predicted_times.with_sections(run.PLANNER.read_text()))"
    assert PLANNER.read_text(encoding="utf-8") == python(code), "run `python benchmarks/run.py --table`"
