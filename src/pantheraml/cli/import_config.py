"""`pantheraml import-config`: convert an Axolotl or LLaMA-Factory config."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError
from pantheraml.base.text import printable

if TYPE_CHECKING:
    from pantheraml.specs.import_config.convert import Conversion


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "import-config",
        help="convert an Axolotl or LLaMA-Factory config",
        description="Convert a training config of Axolotl or LLaMA-Factory, and list what became of each of its keys.",
    )
    parser.add_argument("file", metavar="FILE", help="YAML file of the other trainer")
    parser.add_argument(
        "--from",
        dest="source",
        choices=["axolotl", "llama-factory", "auto"],
        default="auto",
        help="which trainer the file is for (default: auto, by its keys)",
    )
    parser.add_argument("--output", metavar="FILE", help="config file to write (default: print it)")
    parser.add_argument("--json", action="store_true", help="print the config and the lists as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.roots import require_allowed
    from pantheraml.specs.import_config.convert import convert_file

    output = arguments.output
    if output is not None:
        require_allowed(output, key="--output")
    conversion = convert_file(Path(arguments.file), arguments.source)
    if output is not None:
        _write(Path(output), conversion.text)
    command = conversion.command(output or "run.yaml")
    if arguments.json:
        print(json.dumps({**conversion.to_dict(), "command": command}, indent=1, default=str))
        return 0
    if output is None:  # so that `> run.yaml` holds the config alone
        print(conversion.text, end="")
    _report(conversion, command, sys.stdout if output is not None else sys.stderr)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as err:
        raise ConfigError(f"There is already a file {path}.", fix="Choose another name for --output.") from err
    except OSError as err:
        raise ConfigError(f"{path} cannot be written: {err.strerror}.", fix="Choose another --output.") from err


def _report(conversion: Conversion, command: str, file: Any) -> None:
    lists = (
        ("Translated", conversion.translated),
        ("Not needed", conversion.not_needed),
        ("Not supported", conversion.not_supported),
    )
    for title, entries in lists:
        print(f"\n{title}: {len(entries)}", file=file)
        for entry in entries:
            target = f" -> {', '.join(entry.targets)}" if entry.targets else ""
            reason = f": {entry.reason}" if entry.reason else ""
            print(printable(f"  {entry.key}{target}{reason}"), file=file)
    if conversion.notes:
        print("\nNotes:", file=file)
    for note in conversion.notes:
        print(printable(f"  {note}"), file=file)
    print(printable(f"\nTrain:  {command}"), file=file)
