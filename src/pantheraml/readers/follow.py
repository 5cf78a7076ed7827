"""Following a run: new events go to every reader that is interested.

The launching parent calls `Follower.poll()` every tenth of a second while the workers write. A reader that fails, such
as a sink whose server went away, is switched off with one warning; the run itself never notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pantheraml.base import log
from pantheraml.base.events import Event, EventReader
from pantheraml.base.text import printable

logger = log.get(__name__)


class Reader(Protocol):
    """Is handed every event once, in order, and is closed once; `str(reader)` names it in warnings."""

    def handle(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Follower:
    """Reads the new events of a run and hands each to every reader."""

    def __init__(self, run_dir: Path, readers: Sequence[Reader], *, from_end: bool = False) -> None:
        """`from_end` leaves out what the stream holds already, as the progress bar of a resumed run does."""
        self._events = EventReader(run_dir)
        self._readers = list(readers)
        if from_end:
            self._events.skip_to_end()

    def poll(self) -> list[Event]:
        """The complete events since the last poll, after every reader has seen them."""
        events = list(self._events.poll())
        for event in events:
            for reader in list(self._readers):
                try:
                    reader.handle(event)
                except Exception as err:  # noqa: BLE001 - third-party sinks raise anything; none may end a training run
                    self._switch_off(reader, err)
        return events

    def close(self) -> None:
        """Hand out what is left, then close every reader."""
        self.poll()
        while self._readers:
            reader = self._readers.pop(0)
            try:
                reader.close()
            except Exception as err:  # noqa: BLE001 - as above
                logger.warning("%s did not close cleanly: %s", reader, printable(err))

    def _switch_off(self, reader: Reader, err: Exception) -> None:
        self._readers = [other for other in self._readers if other is not reader]
        logger.warning(
            "%s is switched off for the rest of this run: %s: %s", reader, type(err).__name__, printable(err)
        )
        try:
            reader.close()
        except Exception as close_err:  # noqa: BLE001 - as above
            logger.debug("closing %s failed too: %s", reader, close_err)
