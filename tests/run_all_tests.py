"""Run the tests as a script: `python tests/run_all_tests.py`, or `--quick` for those of a few minutes.

Further arguments are pytest's. `make test-all` and `make test` do the same on all cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    rest = [argument for argument in arguments if argument != "--quick"]
    if rest != arguments:
        return run(["tests/unit", "-m", "not extended", *rest])
    # Triton decides at import whether kernels are interpreted, so the interpreter gets a process of its own
    return run(rest) or run(["tests/interpreter", *rest], TRITON_INTERPRET="1")


def run(arguments: list[str], **environment: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.call(command, cwd=ROOT, env={**os.environ, **environment})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
