"""`pantheraml resume`: continue a stopped or failed run from its newest checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "resume", help="continue a stopped run", description="Continue a run from its newest checkpoint."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.execute import Screen, run_training
    from pantheraml.cli.train import show_result
    from pantheraml.specs.run_dir import RunDir

    output = Path(arguments.run_dir)
    config = RunDir(output).config()
    screen = Screen(title=f"resume {output}", quiet=arguments.json)
    summary = run_training(config, output, resume=True, screen=screen)
    show_result(summary, output, as_json=arguments.json)
    return 0
