"""Follow a run: pass new events to every reader.

The parent process calls `Follower.poll()` every 0.1 s while the workers write. A reader that fails, such as a sink
whose server is unreachable, is disabled with one warning; the run continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pantheraml.base import log
from pantheraml.base.event_stream import EventReader
from pantheraml.base.events import EventBase
from pantheraml.base.text import printable

logger = log.get(__name__)


class Reader(Protocol):
    """Gets every event once, in order, and is closed once; `str(reader)` names it in warnings."""

    def handle(self, event: EventBase) -> None: ...

    def close(self) -> None: ...


class Follower:
    """Reads new events of a run and passes each to every reader."""

    def __init__(self, run_dir: Path, readers: Sequence[Reader], *, from_end: bool = False) -> None:
        """`from_end`: skip existing events, as the progress bar of a resumed run does."""
        self._events = EventReader(run_dir)
        self._readers = list(readers)
        if from_end:
            self._events.skip_to_end()

    def poll(self) -> list[EventBase]:
        """Return the complete events since the last poll, after every reader has handled them."""
        events = list(self._events.poll())
        for event in events:
            for reader in list(self._readers):
                try:
                    reader.handle(event)
                except Exception as err:  # noqa: BLE001 - third-party sinks raise anything; none may end a training run
                    self._disable(reader, err)
        return events

    def close(self) -> None:
        """Pass on the remaining events, then close every reader."""
        self.poll()
        while self._readers:
            reader = self._readers.pop(0)
            try:
                reader.close()
            except Exception as err:  # noqa: BLE001 - as above
                logger.warning("%s did not close cleanly: %s", reader, printable(err))

    def _disable(self, reader: Reader, err: Exception) -> None:
        self._readers = [other for other in self._readers if other is not reader]
        logger.warning("%s is disabled for the rest of this run: %s: %s", reader, type(err).__name__, printable(err))
        try:
            reader.close()
        except Exception as close_err:  # noqa: BLE001 - as above
            logger.debug("closing %s failed too: %s", reader, close_err)
