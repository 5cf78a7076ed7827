"""`pantheraml schema`: every key of a config file, as JSON schema."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "schema", help="print the JSON schema of a config file", description="Print the JSON schema of a config file."
    )
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.specs.config_file import json_schema

    print(json.dumps(json_schema(), indent=1))
    return 0
