"""What the files of a user may fill, those on their way among them.

Bytes that are arriving are in no row yet. If they were not counted, a user could send any number of files at a time.
One service has the database, so they are counted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pantheraml.service.errors import DISK_FULL, ApiError
from pantheraml.service.multipart import too_large
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.store.files import bytes_of

MOST_AT_ONCE = 32
"""Bodies with files that a user may be sending at a time."""
_AGAIN_SECONDS = 2
_MOST_KEPT_FREE = 1 << 30
"""Of the disk, or a hundredth of it if that is less."""


class Quota:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._bytes: Counter[str] = Counter()
        self._bodies: Counter[str] = Counter()

    @contextlib.contextmanager
    def body(self, user: str) -> Iterator[None]:
        """Receive a body with a file. ApiError if too many are on their way."""
        if self._bodies[user] >= MOST_AT_ONCE:
            err = ApiError(429, f"You are sending {MOST_AT_ONCE} files at a time; wait for one.", code="rate_limit")
            err.headers["retry-after"] = str(_AGAIN_SECONDS)
            raise err
        with _counted(self._bodies, user, 1):
            yield

    @contextlib.asynccontextmanager
    async def room(self, user: str, announced: int | None, *, around: int = 0) -> AsyncIterator[int]:
        """Most bytes that a file may have, kept free for it within the block. ApiError if it does not fit.

        `announced`: bytes of the file, with up to `around` more of the form that it is in; None: not known.
        """
        most = self._settings.max_file_bytes
        if announced is not None and announced > most + around:
            raise too_large(most)
        with _counted(self._bytes, user, announced or 0):  # before reading: what arrives meanwhile sees it
            async with self._database.read() as session:
                stored = await bytes_of(session, user)
            left = self._settings.max_user_bytes - stored - (self._bytes[user] - (announced or 0))
            if left <= 0 or (announced or 0) > left + around:
                message = f"Your files may have {self._settings.max_user_bytes:,} bytes; {max(0, left):,} are left."
                raise ApiError(403, f"{message} Delete some.", code="quota_exceeded")
            free = await asyncio.to_thread(_free_bytes, self._settings.data_dir)
            free -= self._bytes.total() - (announced or 0)
            if free <= 0 or (announced or 0) > free:
                message = "The disk of the service is nearly full: its operator must make room."
                raise ApiError(DISK_FULL, message, code="disk_full")
            limit = min(most, left, free)
            with _counted(self._bytes, user, limit if announced is None else 0):
                yield limit


def _free_bytes(folder: Path) -> int:
    """What files may fill: the database and the runs of jobs need the rest."""
    usage = shutil.disk_usage(folder)
    return usage.free - min(_MOST_KEPT_FREE, usage.total // 100)


@contextlib.contextmanager
def _counted(counter: Counter[str], user: str, amount: int) -> Iterator[None]:
    counter[user] += amount
    try:
        yield
    finally:
        counter[user] -= amount
        if not counter[user]:
            del counter[user]
