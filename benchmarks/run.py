"""Run a benchmark and write its results with hardware and versions; generate the pages from all results.

    python benchmarks/run.py cli_start [--set repeats=20]     run one; writes benchmarks/results/cli_start-DATE.json
    python benchmarks/run.py --all                            run all that this host supports, with their defaults
    python benchmarks/run.py --list                           list all
    python benchmarks/run.py --table                          write docs/benchmarks.md, performance.md and stability.md

A benchmark is a module next to this one with `run(**parameters)`, which returns {"parameters": {...}, "results": {...}}
(or a list of results, one table row each), and `TABLE`, their presentation (default: all fields, unformatted). One that
requires a GPU sets `NEEDS_GPU = True`. Suites, which compare systems, are run by suite.py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "benchmarks.md"
PERFORMANCE = HERE.parent / "docs" / "performance.md"
STABILITY = HERE.parent / "docs" / "stability.md"
PLANNER = HERE.parent / "docs" / "planner.md"
SERVICE = HERE.parent / "docs" / "service.md"
README = HERE.parent / "README.md"
HISTORY = HERE / "history"
NOT_BENCHMARKS = {
    *(
        "ablation_pieces",
        "accuracy_models",
        "corpus",
        "readme_table",
        "inputs",
        "kernel_op",
        "kernel_ops",
        "kernel_ops_heads",
        "kernel_ops_trained",
        "line_chart",
        "performance_page",
        "planner_page",
        "priority",
        "predicted_scaling",
        "predicted_times",
        "recorded_calls",
        "run",
        "service_section",
        "stability_page",
        "suite",
        "table",
    ),
}
PACKAGES = ("torch", "transformers", "peft", "pantheraml")

sys.path.insert(0, str(HERE))  # benchmarks are scripts next to this one, not a package

import performance_page  # noqa: E402
import planner_page  # noqa: E402
import predicted_times  # noqa: E402
import readme_table  # noqa: E402
import service_section  # noqa: E402
import stability_page  # noqa: E402
from table import Table, history, plain_table, render, render_page  # noqa: E402


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def possible() -> list[str]:
    """Return the benchmarks that can run on this host, and print those that cannot."""
    from pantheraml.devices.probe import probe

    found, has_gpu = [], bool(probe().gpus)
    for name in names():
        if has_gpu or not vars(importlib.import_module(name)).get("NEEDS_GPU", False):
            found.append(name)
        else:
            print(f"{name}: skipped, it needs a GPU")
    return found


def hardware() -> dict[str, Any]:
    from pantheraml.devices.probe import probe

    found = probe()
    return {
        "cpu": cpu_model(),
        "cores": found.cpu_count,
        "ram_bytes": found.ram_bytes,
        "gpus": [gpu.name for gpu in found.gpus],
        "driver": found.driver,
    }


def cpu_model() -> str | None:
    """Return the CPU model from /proc/cpuinfo, or None."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def versions(*further: str) -> dict[str, str | None]:
    """Return package versions from installed metadata, without importing anything heavy. None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *further):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> dict[str, Any]:
    """Return the commit, and whether the tree is dirty. Result files do not count: measuring writes them."""
    head = _git("rev-parse", "HEAD")
    changes = _git(
        "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!benchmarks/history", ":!docs/benchmarks.md"
    )
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=HERE.parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def measure(name: str, parameters: dict[str, Any]) -> Path:
    """Run one benchmark and write its result file."""
    before = {**commit(), "load_before": os.getloadavg()[0]}
    now = datetime.now(UTC)
    measured = importlib.import_module(name).run(**parameters)
    record = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        **before,
        "hardware": hardware(),
        "versions": versions(),
        "parameters": measured["parameters"],
        "results": measured["results"],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{now:%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


OLD_NAMES = {
    "quantis": "quantiz",
    "turned_rows": "fp8_transpose",
    "fp8_product": "fp8_matmul",
    "nf4_fill": "nf4_to_fp8",
    "it passes: run again": "transient NaN: rerun",
    "no NaN at all": "no NaN",
}
"""Substrings of names in older result files, and their current spelling."""


def _with_current_names(text: str) -> str:
    for old, new in OLD_NAMES.items():
        text = text.replace(old, new)
    return text


def records() -> list[dict[str, Any]]:
    """Read all result files, oldest first."""
    found = [json.loads(_with_current_names(path.read_text("utf-8"))) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda record: str(record["date"]))


def page() -> str:
    """Render docs/benchmarks.md."""
    return render(_tables(), _published())


def more_pages() -> dict[Path, str]:
    """Render the pages of benchmarks that have one of their own."""
    tables, found = _tables(), _published()
    names = {table.page for table in tables.values() if table.summary is not None} - {PAGE.stem}
    return {PAGE.with_stem(name): render_page(name, tables, found) for name in sorted(names)}


def histories() -> dict[Path, str]:
    """Render the CSV files, one per benchmark."""
    return {HISTORY / f"{name}.csv": history(name, table, _published()) for name, table in _tables().items()}


def _published() -> list[dict[str, Any]]:
    return [record for record in records() if record["benchmark"] != performance_page.ABLATION]


def _tables() -> dict[str, Table]:
    found = _published()
    return {name: table_of(name, found) for name in sorted({record["benchmark"] for record in found})}


def write_pages() -> list[Path]:
    """Write every generated page and plot; of README.md only the table of ratios changes."""
    found = records()
    texts = {
        PAGE: page(),
        **more_pages(),
        PERFORMANCE: performance_page.page(found),
        STABILITY: stability_page.page(found),
    }
    texts |= histories() | {README: readme_table.with_ratios(README.read_text("utf-8"), found)}
    texts |= {SERVICE: service_section.with_section(SERVICE.read_text("utf-8"), found)}
    planner = planner_page.with_section(PLANNER.read_text("utf-8"), found)
    texts |= {PLANNER: predicted_times.with_sections(planner)}
    texts |= {STABILITY.parent / "images" / name: svg for name, svg in stability_page.pictures(found).items()}
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def suite_module(name: str) -> str:
    """Return the module of a suite: `h200-families` is in suites/h200_families.py."""
    return f"suites.{name.replace('-', '_')}"


def table_of(name: str, records: list[dict[str, Any]]) -> Table:
    """Return the module's `TABLE`, or a default from its docstring and result fields."""
    module = importlib.import_module(name if (HERE / f"{name}.py").exists() else suite_module(name))
    own: Table | None = vars(module).get("TABLE")
    if own is not None:
        return own
    return plain_table(module.__doc__ or name, [record for record in records if record["benchmark"] == name])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run benchmarks and publish their results.")
    parser.add_argument("name", nargs="?", help="benchmark to run")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="set a parameter of that benchmark")
    parser.add_argument("--all", action="store_true", help="run every benchmark that this host supports")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument(
        "--table", action="store_true", help="write docs/benchmarks.md, performance.md, stability.md and planner.md"
    )
    given = parser.parse_args(arguments)
    if given.name is not None and given.name not in names():
        parser.error(f"unknown benchmark {given.name!r}; known: {', '.join(names())}")
    if given.set and given.name is None:
        parser.error("--set needs the name of one benchmark")
    if given.list:
        print("\n".join(names()))
    parameters = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in given.set)}
    for name in possible() if given.all else [given.name] if given.name else []:
        path = measure(name, parameters)
        print(f"{path.relative_to(HERE.parent)}\n{json.dumps(json.loads(path.read_text())['results'], indent=2)}")
    if given.table:
        for path in write_pages():
            print(path.relative_to(HERE.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
