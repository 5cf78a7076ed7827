"""Run a suite: compare systems on one host, every case in its own process.

    pantheraml bench --suite h200                    run all of it
    pantheraml bench --suite h200 --minutes 9        time budget: start no case that would exceed it
    pantheraml bench --suite h200 --resume           continue the newest result file with the missing cases

The result file is written after every case, so that nothing is lost when time runs out. It has a row for every case,
including those that failed, were skipped or did not run, with the reason.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import importlib.metadata
import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # benchmarks are scripts next to this one, not a package

import run as runner  # noqa: E402
from suites.case import Case  # noqa: E402
from suites.process import tail  # noqa: E402
from suites.run_case import CaseLauncher, run_case  # noqa: E402
from suites.workshop import SuiteFolder  # noqa: E402

PEERS = ("trl", "datasets", "liger-kernel", "unsloth", "unsloth-zoo", "bitsandbytes", "xformers", "torchao", "triton")
EXTRAS = ("flash-attn-4", "nvidia-cutlass-dsl")
DONE = "measured"
SETTLED = (DONE, "out of memory")
"""Outcomes that another try would repeat."""
NOT_TRIED = (None, "not run")
LOG_LINES = 15
"""Lines of a failed case's log to print; the host may be gone later."""


def suite_names() -> list[str]:
    """Return the names of the modules in `suites` that have cases, with hyphens."""
    found = sorted(path.stem for path in (HERE / "suites").glob("*.py"))
    return [name.replace("_", "-") for name in found if "CASES" in vars(importlib.import_module(f"suites.{name}"))]


@dataclass(frozen=True)
class Wanted:
    """Which cases to run, and the time budget."""

    only: tuple[str, ...]
    minutes: float | None
    again: bool

    def names(self, case: Case) -> bool:
        return not self.only or any(fnmatch.fnmatch(case.name, pattern) for pattern in self.only)


class ResultFile:
    """Result file of a suite, with a row for every case from the start."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record = path, record

    @classmethod
    def new(
        cls, folder: Path, suite: str, cases: tuple[Case, ...], commit: str | None, work: SuiteFolder
    ) -> ResultFile:
        now = datetime.now(UTC)
        record = {
            "benchmark": suite,
            "script": f"pantheraml bench --suite {suite}",
            "date": now.isoformat(timespec="seconds"),
            "commit": commit,
            "dirty": runner.commit()["dirty"],
            "load_before": os.getloadavg()[0],
            "hardware": runner.hardware(),
            "versions": runner.versions(*PEERS, *EXTRAS)
            | versions_in(work.peers, PEERS)
            | versions_in(work.extras, EXTRAS),
            "parameters": {"lora_rank": 16, "lora_alpha": 16},
            "results": [case.row(status="not run", reason="not reached") for case in cases],
        }
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder / f"{suite}-{now:%Y%m%dT%H%M%SZ}.json", record)

    @classmethod
    def newest(cls, folder: Path, suite: str) -> ResultFile | None:
        paths = sorted(folder.glob(f"{suite}-[0-9]*.json"))  # `h200-families-...` belongs to another suite
        return cls(paths[-1], json.loads(paths[-1].read_text(encoding="utf-8"))) if paths else None

    def status(self, case: Case) -> str | None:
        return next((row["status"] for row in self.record["results"] if row["case"] == case.name), None)

    def put(self, row: dict[str, Any]) -> None:
        rows = self.record["results"]
        place = next((i for i, old in enumerate(rows) if old["case"] == row["case"]), len(rows))
        rows[place : place + 1] = [row]
        self.write()

    def write(self) -> None:
        aside = self.path.with_suffix(".unfinished")
        aside.write_text(json.dumps(self.record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        aside.rename(self.path)


def run_suite(
    cases: tuple[Case, ...], wanted: Wanted, file: ResultFile, launcher: CaseLauncher, commit: str | None
) -> None:
    end = None if wanted.minutes is None else time.monotonic() + 60 * wanted.minutes
    file.write()
    chosen = to_run(cases, wanted, file)
    for place, case in enumerate(chosen):
        if end is not None and time.monotonic() + 60 * case.minutes > end:
            if file.status(case) in NOT_TRIED:
                file.put(case.row(status="not run", reason=f"no time left of {wanted.minutes:g} minutes"))
            continue
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        row = run_case(case, commit, launcher, coming=chosen[place + 1 :])
        file.put(row)
        print(f"{case.name}: {describe(row)}", file=sys.stderr, flush=True)
        if row["status"] in ("failed", "timed out"):
            print(tail(launcher.suite_folder.log(case.name), lines=LOG_LINES), file=sys.stderr, flush=True)


def to_run(cases: tuple[Case, ...], wanted: Wanted, file: ResultFile) -> list[Case]:
    """Cases without a result; those that failed come last, lest every call spends its time on them again."""
    named = [case for case in cases if wanted.names(case)]
    if wanted.again:
        return named
    left = [case for case in named if file.status(case) not in SETTLED]
    return sorted(left, key=lambda case: file.status(case) not in NOT_TRIED)


def versions_in(folder: Path | None, names: tuple[str, ...]) -> dict[str, str]:
    """Versions of packages in `folder`, which take precedence for cases that see it."""
    found = () if folder is None else importlib.metadata.distributions(path=[str(folder)])
    named = {each.name.replace("_", "-").lower(): each.version for each in found}
    return {name: named[name] for name in names if name in named}


def describe(row: dict[str, Any]) -> str:
    if row["status"] != DONE:
        return f"{row['status']}: {row['reason']}"
    peak = "" if row["peak_gib"] is None else f", {row['peak_gib']:.2f} GiB"
    speed = "measured" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:,.0f} tokens/s"
    return f"{speed}{peak}, first step after {row['seconds_to_first_step']:.1f} s"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("pantheraml bench", description="Run a suite of benchmarks.")
    parser.add_argument("--suite", required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--device", choices=["cpu"])
    parser.add_argument("--work", type=Path, default=Path("runs/bench"))
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--extras", type=Path)
    parser.add_argument("--results", type=Path, default=runner.RESULTS)
    given = parser.parse_args(arguments)
    if given.suite not in suite_names():
        parser.error(f"unknown suite {given.suite!r}; known: {', '.join(suite_names())}")
    cases: tuple[Case, ...] = importlib.import_module(runner.suite_module(given.suite)).CASES
    wanted = Wanted(tuple(given.only), given.minutes, given.again)
    chosen = [case for case in cases if wanted.names(case)]
    if not chosen:
        parser.error(f"no case of {given.suite} matches {' or '.join(given.only)}; --list shows them")
    for folder in (given.peers, given.extras):
        if folder is not None and not folder.is_dir():
            parser.error(f"no such folder: {folder}")
    if given.list:
        show_list(chosen, as_json=given.json)
        return 0
    file = ResultFile.newest(given.results, given.suite) if given.resume else None
    commit = given.commit or runner.commit()["commit"]
    peers, extras = (None if folder is None else folder.resolve() for folder in (given.peers, given.extras))
    work = SuiteFolder(given.work.resolve() / given.suite, given.device, peers, extras)
    file = file or ResultFile.new(given.results, given.suite, cases, commit, work)
    with CaseLauncher(work) as launcher:
        run_suite(cases, wanted, file, launcher, commit)
    if given.results == runner.RESULTS:
        runner.write_pages()
    rows = [row for row in file.record["results"] if row["case"] in {case.name for case in chosen}]
    print(json.dumps(file.record, indent=1) if given.json else file.path)
    return 0 if all(row["status"] == DONE for row in rows) else 1


def show_list(cases: list[Case], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([case.row(status="not run") | {"minutes": case.minutes} for case in cases], indent=1))
        return
    width = max(len(case.name) for case in cases)
    for case in cases:
        print(f"{case.name:{width}}  {case.minutes:g} min")
    print(f"{len(cases)} cases, about {sum(case.minutes for case in cases):.0f} minutes")


if __name__ == "__main__":
    sys.exit(main())
