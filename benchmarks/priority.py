"""The priority of what is measured, on a host where others are at work."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def set_niceness(pid: int, niceness: int) -> None:
    """Of a process and of its session: Linux first shares the cores between sessions, where it groups them."""
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
