"""The benchmark runner: content of result files, and pages generated from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.unit.benchmarks.conftest import Python

ROOT = Path(__file__).parents[3]
RUN = ROOT / "benchmarks" / "run.py"


def test_page_is_up_to_date(python: Python) -> None:
    generated = python("import run; sys.stdout.write(run.page())")
    written = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert written == generated, "run `python benchmarks/run.py --table`"
    assert len(written.encode()) <= 10 << 10


def test_pages_of_long_tables_are_up_to_date(python: Python) -> None:
    code = "import json, run; print(json.dumps({str(path): text for path, text in run.more_pages().items()}))"
    pages = json.loads(python(code))
    assert [Path(name).name for name in pages] == ["benchmarks-families.md"]
    for name, text in pages.items():
        assert Path(name).read_text(encoding="utf-8") == text, "run `python benchmarks/run.py --table`"
        assert f"({Path(name).name})" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


FULL = """
from suites import h200_families
figures = {"tokens_per_second": 30123.4, "peak_gib": 30.12, "seconds_to_first_step": 20.0}
rows = [case.row(status="measured", **figures) for case in h200_families.CASES]
print(h200_families.TARGETS.markdown([{"results": rows}]))
"""


def test_all_comparisons_of_families_fit_on_their_page(python: Python) -> None:
    text = python(FULL)
    assert len(text.encode()) <= 10 << 10
    assert "| Qwen3-4B LoRA 4x2048 | ours-qwen3-4b-lora | 30,123 | 48,000: no | 30.1 | 24: no |" in text
    assert "not measured" not in text


def test_csv_files_are_up_to_date(python: Python) -> None:
    code = "import json, run; print(json.dumps({path.name: text for path, text in run.histories().items()}))"
    generated = json.loads(python(code))
    written = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks/history").glob("*.csv")}
    assert written == generated, "run `python benchmarks/run.py --table`"


def test_result_file_has_hardware_versions_and_commit(python: Python, tmp_path: Path) -> None:
    code = (
        "import run; from pathlib import Path; run.RESULTS = Path(sys.argv[1])\n"
        "print(run.measure('cli_start', {'repeats': 1}))"
    )
    record = json.loads(Path(python(code, str(tmp_path)).strip()).read_text(encoding="utf-8"))
    assert list(record) == ["benchmark", "date", "commit", "dirty", "load_before", "hardware", "versions", "parameters",
                            "results"]  # fmt: skip
    assert record["benchmark"] == "cli_start"
    assert record["parameters"] == {"repeats": 1}
    assert record["hardware"]["cores"] >= 1
    assert record["hardware"]["ram_bytes"] > 2**28
    assert record["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert record["versions"]["pantheraml"] == "0.1.0"
    results = record["results"]
    assert results["python_seconds"] > 0
    assert results["import_seconds"] > 0


def test_unknown_benchmark_lists_the_known_ones() -> None:
    done = subprocess.run([sys.executable, str(RUN), "cli_stard"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "known: ablation, accuracy, auto_defaults, checkpoint_save" in done.stderr


def test_benchmarks_that_need_a_gpu_are_skipped_without_one(python: Python) -> None:
    code = (
        "import run; from pantheraml.devices.probe import probe\n"
        "found = run.possible()\n"
        "assert (set(run.names()) - set(found) == set()) == bool(probe().gpus)\n"
        "assert {'cli_start', 'data_pipeline', 'engine_overhead'} <= set(found)\n"
        "assert all('run' in vars(run.importlib.import_module(name)) for name in run.names())\n"
        "assert 'torch' not in sys.modules"
    )
    output = python(code)
    assert not output or "kernels: skipped, it needs a GPU" in output


RECORD: dict[str, Any] = {
    "benchmark": "made_up",
    "date": "2030-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "dirty": True,
    "load_before": 0.25,
    "hardware": {"cpu": "A CPU", "cores": 4, "ram_bytes": 1, "gpus": ["A GPU", "A GPU"], "driver": None},
    "versions": {"python": "3.12.1", "torch": None},
    "parameters": {"rows": 10},
    "results": [{"seconds": 0.123456}, {"seconds": 2.0, "note": "a|b"}],
}

TABLES = """
import json
import table
record = json.loads(sys.argv[1])
plain = table.plain_table("How fast it is.\\n\\nMore.", [record])
columns = (table.Column("time", "seconds", table.milliseconds),)
own = table.Table("Fast", "How.", columns, lambda found: f"{len(found)}.")
newer = {**record, "date": "2031-01-01T00:00:00+00:00", "results": {"seconds": 1.0}}
print(table.render({"made_up": plain}, [record]))
print(table.render({"made_up": own}, [record, newer]))
print(table.history("made_up", own, [record, newer]))
"""


def test_tables(python: Python) -> None:
    output = python(TABLES, json.dumps(RECORD)).partition("# Benchmarks")[2]
    assert "| How fast it is | 2 x A GPU | 2030-01-02, `012345678`+ | `made_up.csv` |" in output
    assert "## Fast\n\nHow. (`benchmarks/made_up.py`; all results: `benchmarks/history/made_up.csv`)\n\n2.\n" in output
    origin = "2 x A GPU,0.2,Python 3.12.1,`012345678`+"
    assert output.endswith(
        "time,hardware,load,versions,commit,date\n"
        f"1000 ms,{origin},2031-01-01\n123 ms,{origin},2030-01-02\n2000 ms,{origin},2030-01-02\n\n"
    )


STOPPED = """
import json
import table
record = json.loads(sys.argv[1]) | {"results": [{"status": "not run"}]}
print(table.render({"made_up": table.plain_table("How fast it is.", [record])}, [record]))
"""


def test_a_suite_that_was_stopped_in_its_first_case_is_listed(python: Python) -> None:
    assert "| How fast it is | 2 x A GPU | 2030-01-02, `012345678`+ |" in python(STOPPED, json.dumps(RECORD))
