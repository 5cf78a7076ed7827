"""Distinguish a process from a later one with the same pid: by boot, pid and start time.

A supervisor writes its identity down, so that a service that was restarted, perhaps after a reboot, can check whether
that very process is still running.
"""

from __future__ import annotations

from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessIdentity(BaseModel):
    model_config = ConfigDict(frozen=True)

    boot_id: str
    pid: int
    start_time: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a process; None if there is none, or only a zombie."""
        start_time = _start_time(pid)
        return None if start_time is None else cls(boot_id=_boot_id(), pid=pid, start_time=start_time)

    def is_running(self) -> bool:
        return self == ProcessIdentity.of(self.pid)


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"{psutil.boot_time():.0f}"


def _start_time(pid: int) -> str | None:
    """Return the start time: on Linux in clock ticks since boot, which are independent of the date; elsewhere psutil's
    creation time."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        if _BOOT_ID.exists():
            fields = stat.read_text().rpartition(")")[2].split()  # the name before may contain spaces and brackets
            return None if fields[0] in "ZX" else fields[19]
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except (OSError, psutil.NoSuchProcess):
        return None
