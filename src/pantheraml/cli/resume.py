"""`pantheraml resume`: continue a stopped or failed run from its newest checkpoint, on any number of processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pantheraml.cli.consent import add_consent, consent_from
from pantheraml.cli.train import add_allow_change, add_machines, resume_overrides, show_result, start_this_machine


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "resume", help="continue a stopped run", description="Continue a run from its newest checkpoint."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run folder")
    parser.add_argument("--nproc", metavar="auto|N", help="number of processes from now on (parallel.world_size)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="set any key; may be repeated"
    )
    add_allow_change(parser)
    add_machines(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    add_consent(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.execute import Screen, run_training
    from pantheraml.specs.config_file import load_config
    from pantheraml.specs.run_dir import RunDir

    output = Path(arguments.run_dir)
    run = RunDir(output)
    run.received_config(consent_from(arguments))
    config = load_config(run.config_file, resume_overrides(arguments))
    start_this_machine(arguments, config, output)
    screen = Screen(title=f"resume {output}", quiet=arguments.json)
    summary = run_training(config, output, resume=True, screen=screen)
    show_result(summary, output, as_json=arguments.json)
    return 0
