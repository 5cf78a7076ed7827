"""A process of a suite: its output goes to a log, it can be told that its turn has come, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


class Process:
    """Started at once; one that waits for its turn reads a line from its input, which ends if the suite does."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str], cwd: Path | None = None) -> None:
        self.began = time.time()
        with open(log, "wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=cwd,
                start_new_session=True,
                bufsize=0,
            )

    def run(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> int | None:
        """Its turn: the exit code, or None if it took too long; then it and all that it started are ended."""
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and says how
                self._process.stdin.write(b"\n")
            meanwhile()
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """If it still runs, with all that it started."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdin.close()


def tail(log: Path, lines: int | None = None) -> str:
    """The last `lines` lines that are not empty (None: all of them); nothing if there is no log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = [line for line in text.splitlines() if line.strip()]
    return "\n".join(found if lines is None else found[-lines:])


def last_line(log: Path) -> str:
    """Where programs say what went wrong; a traceback ends with it."""
    lines = tail(log).splitlines()
    said = next((line for line in reversed(lines) if "Error:" in line or "Exception" in line), None)
    return (said or (lines[-1] if lines else "no output")).strip()[:300]
