"""`pantheraml schema`: the JSON schema of config files, or of a run's events."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "schema",
        help="print the JSON schema of config files or events",
        description="Print the JSON schema of config files, or of the events in a run's events.jsonl.",
    )
    parser.add_argument("--events", action="store_true", help="the events of a run, one schema per kind")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.events:
        from pantheraml.base.events import event_schema

        print(json.dumps(event_schema(), indent=1))
        return 0
    from pantheraml.specs.config_file import json_schema

    print(json.dumps(json_schema(), indent=1))
    return 0
