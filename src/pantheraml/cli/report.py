"""`pantheraml report RUN_DIR`: write the page of a run, finished or not."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pantheraml.base.text import printable


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write the report of a run as a page",
        description="Write a self-contained page about a run from its events. The run may still be in progress.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--output", metavar="FILE", help="page to write (default: RUN_DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="print the run's figures, those of run.json, as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.roots import require_allowed
    from pantheraml.readers import number_format as figures
    from pantheraml.readers.recorded_run import read_run
    from pantheraml.readers.report import write_report
    from pantheraml.readers.summary import as_json

    folder = Path(arguments.run_dir)
    if arguments.output:
        require_allowed(arguments.output, key="--output")
    recorded = read_run(folder)
    page = write_report(folder, Path(arguments.output) if arguments.output else None)
    summary = recorded.summary
    if arguments.json:
        print(json.dumps(as_json({**summary, "report": str(page)}), indent=1, allow_nan=False))
        return 0
    total = f" of {figures.count(summary['total_steps'])}" if summary["total_steps"] else ""
    parts = [f"{summary['status']}, step {figures.count(summary['steps'])}{total}"]
    parts.append(f"loss {figures.loss(summary['final_loss'])}")
    if summary["final_eval_loss"] is not None:
        parts.append(f"eval {figures.loss(summary['final_eval_loss'])}")
    parts.append(f"{figures.count(summary['tokens_per_second'])} tokens/s")
    print(printable(" · ".join(parts)))
    print(printable(f"report: {page}"))
    return 0
