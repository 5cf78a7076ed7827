"""A process of a suite: logs its output, waits for its turn, and is killed with all its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pantheraml.launch.local import die_with_parent


class Process:
    """Starts immediately; to wait for its turn, it reads a line from stdin. It ends with the suite, also if that is
    killed: it would disturb what is measured next on this host."""

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
                preexec_fn=die_with_parent,
                bufsize=0,
            )

    def run(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> int | None:
        """Give it its turn; return the exit code, or None on timeout. Afterwards it and its children are killed."""
        try:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has exited already
                self._process.stdin.write(b"\n")
            meanwhile()
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Kill it and its children, if it still runs."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdin.close()


def tail(log: Path, lines: int | None = None) -> str:
    """Return the last `lines` non-empty lines (None: all); empty if there is no log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    found = [line for line in text.splitlines() if line.strip()]
    return "\n".join(found if lines is None else found[-lines:])


def last_line(log: Path) -> str:
    """Return the last error line of the log, as at the end of a traceback."""
    lines = tail(log).splitlines()
    error = next((line for line in reversed(lines) if "Error:" in line or "Exception" in line), None)
    return (error or (lines[-1] if lines else "no output")).strip()[:300]
