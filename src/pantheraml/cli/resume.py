"""`pantheraml resume`: continue a stopped or failed run from its newest checkpoint, on any number of processes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pantheraml.cli.consent_flags import add_consent, consent_from
from pantheraml.cli.train import add_allow_change, add_node_options, launch_this_node, resume_overrides, show_result


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
    add_node_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    add_consent(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.screen import progress
    from pantheraml.runs.session import run_training
    from pantheraml.specs.config_file import load_config
    from pantheraml.specs.run_dir import RunDir

    output = Path(arguments.run_dir)
    run = RunDir(output)
    run.received_config(consent_from(arguments))
    config = load_config(run.config_file, resume_overrides(arguments))
    launch_this_node(arguments, config, output)
    summary = run_training(config, output, resume=True, readers=progress(f"resume {output}", quiet=arguments.json))
    show_result(summary, output, as_json=arguments.json)
    return 0
