"""Benchmarks are scripts that import each other through sys.path, so tests run them in their own processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


class Python(Protocol):
    def __call__(self, code: str, *arguments: str) -> str: ...


@pytest.fixture
def python() -> Python:
    """Runs code that can import every module in `benchmarks`, and returns its output."""

    def run(code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{code}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
