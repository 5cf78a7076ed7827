"""Emit `data.progress` events: at most a few per second, and always one at the end."""

from __future__ import annotations

import time

from pantheraml.base.events import DataProgress, Emit

_SECONDS_BETWEEN = 0.25


class PrepareProgress:
    def __init__(self, emit: Emit, *, split: str, stage: str, total: int) -> None:
        self._emit = emit
        self._split = split
        self._stage = stage
        self._total = total
        self._done = 0
        self._next = time.monotonic() + _SECONDS_BETWEEN

    def advance(self, size: int) -> None:
        self._done = min(self._total, self._done + size)
        if time.monotonic() >= self._next:
            self._send()

    def finish(self) -> None:
        self._done = self._total
        self._send()

    def _send(self) -> None:
        self._emit(DataProgress(split=self._split, stage=self._stage, done=self._done, total=self._total, unit="bytes"))
        self._next = time.monotonic() + _SECONDS_BETWEEN
