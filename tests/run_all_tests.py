"""`python tests/run_all_tests.py [--quick] [PYTEST ARGUMENT ...]`: what `make test-all` runs; --quick: `make test`.

For an environment that is there already: make also creates one. The exit code is that of the first part that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest"]
# as in the Makefile: files are spread over the cores, with one thread each
SPREAD = ["--numprocesses", "logical", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def parts(quick: bool) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments of pytest and environment of each part. Triton's interpreter needs a process of its own."""
    first: tuple[list[str], dict[str, str]] = (["-m", "not extended"], {})
    return [first] if quick else [first, (["-m", "extended"], {}), (["tests/interpreter"], {"TRITON_INTERPRET": "1"})]


def main(arguments: list[str]) -> int:
    quick = "--quick" in arguments
    others = [argument for argument in arguments if argument != "--quick"]
    for own, variables in parts(quick):
        environment = {**os.environ, **ONE_THREAD, **variables}
        code = subprocess.run([*PYTEST, *SPREAD, *own, *others], cwd=ROOT, env=environment, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
