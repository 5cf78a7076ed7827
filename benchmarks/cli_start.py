"""Start-up time of `pantheraml --help` and `import pantheraml`, next to a bare interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from table import Column, Table, milliseconds

TABLE = Table(
    title="Command line start-up",
    how="Median wall time of whole processes, alternating, after one warm-up run of each.",
    columns=(
        Column("`pantheraml --help`", "help_seconds", milliseconds),
        Column("`import pantheraml`", "import_seconds", milliseconds),
        Column("`python -c pass`", "python_seconds", milliseconds),
        Column("runs", "parameters.repeats"),
    ),
)


def run(repeats: int = 10) -> dict[str, Any]:
    commands = {
        "help_seconds": [str(Path(sysconfig.get_path("scripts")) / "pantheraml"), "--help"],
        "import_seconds": [sys.executable, "-c", "import pantheraml"],
        "python_seconds": [sys.executable, "-c", "pass"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats + 1):  # alternating, so that a load spike affects all of them
        for name, command in commands.items():
            times[name].append(_seconds(command))
    medians = {name: statistics.median(found[1:]) for name, found in times.items()}
    return {"parameters": {"repeats": repeats}, "results": medians}


def _seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin
