"""Runs a benchmark and writes what it measured, where and with what; makes the pages about them.

    python benchmarks/run.py cli_start [--set repeats=20]     run one; writes benchmarks/results/cli_start-DATE.json
    python benchmarks/run.py --all                            run all that can run here, each with its defaults
    python benchmarks/run.py --list                           name all
    python benchmarks/run.py --table                          write docs/benchmarks.md, performance.md and stability.md

A benchmark is a module beside this one with `run(**parameters)`, which returns {"parameters": {...}, "results": {...}}
(or a list of results, one table row each), and `TABLE`, which says how they are shown (without it: as they are). One
that makes no sense without a GPU says `NEEDS_GPU = True`. Suites, which compare systems, are run by suite.py.
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
HISTORY = HERE / "history"
NOT_BENCHMARKS = {
    *(
        "corpus",
        "inputs",
        "kernel_op",
        "kernel_ops",
        "kernel_ops_trained",
        "line_chart",
        "performance_page",
        "recorded_calls",
        "run",
        "stability_page",
        "suite",
        "table",
    ),
}
PACKAGES = ("torch", "transformers", "peft", "pantheraml")

sys.path.insert(0, str(HERE))  # benchmarks are scripts beside this one, not a package

import performance_page  # noqa: E402
import stability_page  # noqa: E402
from table import Table, history, plain_table, render  # noqa: E402


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)


def possible() -> list[str]:
    """All that can run here; those that cannot are named."""
    from pantheraml.devices.probe import probe

    found, has_gpu = [], bool(probe().gpus)
    for name in names():
        if has_gpu or not vars(importlib.import_module(name)).get("NEEDS_GPU", False):
            found.append(name)
        else:
            print(f"{name}: left out, it needs a GPU")
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
    """As Linux names it; None where it does not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def versions(*further: str) -> dict[str, str | None]:
    """From the installed metadata: a benchmark's runner imports nothing heavy. None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *further):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> dict[str, Any]:
    """The commit, and whether the tree differed from it. Result files do not count: measuring writes them."""
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
    """Run one benchmark and write its file."""
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


def records() -> list[dict[str, Any]]:
    """All results, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda record: str(record["date"]))


def page() -> str:
    """What docs/benchmarks.md should hold, from all result files."""
    return render(_tables(), _published())


def histories() -> dict[Path, str]:
    """What the CSV files should hold, one for each benchmark."""
    return {HISTORY / f"{name}.csv": history(name, table, _published()) for name, table in _tables().items()}


def _published() -> list[dict[str, Any]]:
    return [record for record in records() if record["benchmark"] != performance_page.ABLATION]


def _tables() -> dict[str, Table]:
    found = _published()
    return {name: table_of(name, found) for name in sorted({record["benchmark"] for record in found})}


def write_pages() -> list[Path]:
    """docs/benchmarks.md, the CSV files, docs/performance.md, and docs/stability.md with its pictures."""
    found = records()
    texts = {PAGE: page(), PERFORMANCE: performance_page.page(found), STABILITY: stability_page.page(found)}
    texts |= histories()
    texts |= {STABILITY.parent / "images" / name: svg for name, svg in stability_page.pictures(found).items()}
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(texts)


def table_of(name: str, records: list[dict[str, Any]]) -> Table:
    """The module's own description, or one made from its first line and the fields of its results."""
    module = importlib.import_module(name if (HERE / f"{name}.py").exists() else f"suites.{name}")
    own: Table | None = vars(module).get("TABLE")
    if own is not None:
        return own
    return plain_table(module.__doc__ or name, [record for record in records if record["benchmark"] == name])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run benchmarks and publish their results.")
    parser.add_argument("name", nargs="?", help="which benchmark to run")
    parser.add_argument("--set", action="append", default=[], metavar="K=V", help="a parameter of that benchmark")
    parser.add_argument("--all", action="store_true", help="run every benchmark that can run here")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument(
        "--table", action="store_true", help="write docs/benchmarks.md, performance.md and stability.md"
    )
    given = parser.parse_args(arguments)
    if given.name is not None and given.name not in names():
        parser.error(f"there is no benchmark {given.name!r}; known: {', '.join(names())}")
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
