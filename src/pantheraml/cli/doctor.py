"""`pantheraml doctor`: does this host train? Each check is a line, and each problem comes with its fix."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from pantheraml.base.text import printable
from pantheraml.specs.diagnosis import Check, Diagnosis, Status

MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warn", "yellow"),
    "failed": ("FAIL", "bold red"),
    "skipped": ("-", "dim"),
}
NAME_WIDTH = 15


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check installation, GPUs, communication and training",
        description="Check versions, driver, GPUs, disk space and environment; have several processes exchange tensors;"
        " train a tiny model. The exit code is 0 if no check failed; warnings do not count.",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml import __version__
    from pantheraml.runs.doctor import examine

    if arguments.json:
        checks = tuple(examine(lambda text: contextlib.nullcontext()))
        diagnosis = Diagnosis(version=__version__, checks=checks)
        print(diagnosis.model_dump_json(indent=1))
        return diagnosis.exit_code
    screen = _Screen(f"PantheraML {__version__}")
    checks = tuple(screen.show(check) for check in examine(screen.doing))
    diagnosis = Diagnosis(version=__version__, checks=checks)
    screen.close(diagnosis)
    return diagnosis.exit_code


class _Screen:
    """Prints checks as they end, with a spinner for the current one."""

    def __init__(self, title: str) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._console.print(title)

    def doing(self, text: str) -> contextlib.AbstractContextManager[object]:
        return self._console.status(f"{text} ...")

    def show(self, check: Check) -> Check:
        self._print(check)
        return check

    def _print(self, check: Check) -> None:
        from rich.table import Table
        from rich.text import Text

        word, style = MARKS[check.status]
        found = Text(printable(check.found), style="dim" if check.status == "skipped" else "")
        if check.fix is not None:
            found.append(printable(f"\nfix: {check.fix}"), style=style)
        line = Table.grid(padding=(0, 2))
        line.add_column(width=4)
        line.add_column(width=NAME_WIDTH)
        line.add_column(overflow="fold")
        line.add_row(Text(word, style=style), Text(check.name), found)
        self._console.print(line)

    def close(self, diagnosis: Diagnosis) -> None:
        failures, warnings = diagnosis.count("failed"), diagnosis.count("warning")
        noted = f", {warnings} warning{'s' if warnings != 1 else ''}" if warnings else ""
        if failures:
            self._console.print(f"{failures} problem{'s' if failures > 1 else ''}{noted}.", style="bold red")
        else:
            self._console.print(f"This host can train{noted}.", style="bold green")
