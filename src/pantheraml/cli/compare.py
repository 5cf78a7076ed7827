"""`pantheraml compare RUN...`: figures of runs side by side, and how their configurations differ."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from pantheraml.readers.compare import Comparison, Row

TITLE_WIDTH, RUN_WIDTH = 28, 20


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "compare",
        help="show runs side by side",
        description="Show the figures of runs side by side, and the settings in which they differ. With --html, also"
        " their curves over each other.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--html", metavar="FILE", help="write a page that works offline")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.roots import require_allowed
    from pantheraml.readers.compare import compare
    from pantheraml.readers.summary import as_json

    if arguments.html:
        require_allowed(arguments.html, key="--html")
    found = compare([Path(name) for name in arguments.runs])
    if arguments.html:
        from pantheraml.readers.compare_page import write_comparison

        page = write_comparison(found, Path(arguments.html))
    if arguments.json:
        print(json.dumps(as_json(found.to_json()), indent=1, default=str, allow_nan=False))
        return 0
    _print(found)
    if arguments.html:
        print(f"page: {page}")
    return 0


def _print(found: Comparison) -> None:
    from rich.console import Console
    from rich.text import Text

    from pantheraml.base.text import printable

    console = Console()
    if not console.is_terminal:  # a pipe has no width
        console = Console(width=TITLE_WIDTH + 60 * len(found.names))
    fitting = max(1, (console.width - TITLE_WIDTH) // RUN_WIDTH)
    for first in range(0, len(found.names), fitting):
        chosen = range(first, min(first + fitting, len(found.names)))
        console.print(_table("", found.rows, found.names, chosen))
        if found.differences:
            console.print()
            console.print(_table("differences of the configuration", found.differences, found.names, chosen))
        elif first == 0 and len(found.names) > 1 and all(run.config is not None for run in found.runs):
            console.print(Text("\nThe configurations do not differ."))
    for note in found.notes:
        console.print(Text(f"\n{printable(note)}", style="yellow"))


def _table(title: str, rows: Sequence[Row], names: Sequence[str], chosen: range) -> Table:
    from rich.table import Table
    from rich.text import Text

    from pantheraml.base.text import printable

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column(Text(title, style="bold"))
    for index in chosen:
        table.add_column(Text(printable(names[index])), justify="right", overflow="fold")
    for row in rows:
        cells = [Text(printable(row.cells[index]), style="green" if row.best == index else "") for index in chosen]
        table.add_row(Text(printable(row.title), style="dim"), *cells)
    return table
