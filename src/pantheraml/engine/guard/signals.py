"""How a worker learns that it should stop: a signal, or a file that the launching parent puts into the run folder.

The file is for the parent on this machine (Ctrl-C); the signal is for schedulers and for a parent that died. Either
only raises a flag; the loop looks at it between steps, where all ranks agree on stopping, save, and leave in order.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pantheraml.launch.local import NOTICES


class StopFlag:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._parent = os.getppid()
        self.signal: signal.Signals | None = None
        """The first that came, if one did."""

    @property
    def lost_parent(self) -> bool:
        """Whether the process that started this one is gone, and did not ask: then the kernel has sent the signal."""
        return os.getppid() != self._parent and not self._file.exists()

    def is_raised(self) -> bool:
        return self.signal is not None or self._file.exists()

    @contextmanager
    def listening(self) -> Iterator[StopFlag]:
        def on_signal(number: int, frame: FrameType | None) -> None:
            self.signal = self.signal or signal.Signals(number)

        # Ctrl-C reaches the parent alone; a SIGINT that gets here all the same must not kill a rank in mid-step.
        before = {number: signal.signal(number, on_signal) for number in (*NOTICES, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
