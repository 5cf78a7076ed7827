"""`pantheraml demo`: train and fine-tune a small model from scratch, offline, in minutes, and measure the result."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="train and fine-tune a small model, offline, in minutes",
        description="Train a small language model on generated data, fine-tune it on a new task, and measure it before"
        " and after. Needs no network and no GPU. Replaces an earlier demo in the same folder.",
    )
    parser.add_argument("--output", default="runs/demo", metavar="DIR", help="demo folder (default: runs/demo)")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.demonstration import demonstrate

    demonstrate(Path(arguments.output))
    return 0
