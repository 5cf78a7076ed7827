"""Disk quota of a user's files and jobs, including files being uploaded.

Bytes that are arriving are in no row yet. If they were not counted, a user could send any number of files at a time.
One service has the database, so they are counted here. Folders of jobs, which hold checkpoints and models, are measured
when they are asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from sqlalchemy import select

from pantheraml.service.errors import DISK_FULL, ApiError
from pantheraml.service.multipart import too_large
from pantheraml.service.settings import Settings
from pantheraml.service.store.database import Database
from pantheraml.service.store.files import bytes_of
from pantheraml.service.store.tables import Job

MOST_AT_ONCE = 32
"""Bodies with files that a user may be sending at a time."""
_AGAIN_SECONDS = 2
_MEASURED_SECONDS = 30.0
"""How long the measured size of a user's jobs counts: many files may come at once, and jobs grow slowly."""
_MOST_KEPT_FREE = 1 << 30
"""Bytes of the disk kept free, or a hundredth of it if that is less."""


class Quota:
    def __init__(self, database: Database, settings: Settings) -> None:
        self._database, self._settings = database, settings
        self._bytes: Counter[str] = Counter()
        self._bodies: Counter[str] = Counter()
        self._measured: dict[str, tuple[float, int]] = {}

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
            left = await self._left(user) + (announced or 0)
            if left <= 0 or (announced or 0) > left + around:
                raise self._exceeded(left)
            free = await asyncio.to_thread(_free_bytes, self._settings.data_dir)
            free -= self._bytes.total() - (announced or 0)
            if free <= 0 or (announced or 0) > free:
                message = "The disk of the service is nearly full: its operator must make room."
                raise ApiError(DISK_FULL, message, code="disk_full")
            limit = min(most, left, free)
            with _counted(self._bytes, user, limit if announced is None else 0):
                yield limit

    async def require_some(self, user: str) -> None:
        """ApiError if nothing is left for what a job writes."""
        left = await self._left(user)
        if left <= 0:
            raise self._exceeded(left)

    def measure_again(self, user: str) -> None:
        """Something of a job was deleted."""
        self._measured.pop(user, None)

    async def _left(self, user: str) -> int:
        async with self._database.read() as session:
            stored = await bytes_of(session, user)
        return self._settings.max_user_bytes - stored - await self._bytes_of_jobs(user) - self._bytes[user]

    async def _bytes_of_jobs(self, user: str) -> int:
        moment, size = self._measured.get(user, (-_MEASURED_SECONDS, 0))
        if time.monotonic() - moment < _MEASURED_SECONDS:
            return size
        async with self._database.read() as session:
            names = (await session.scalars(select(Job.id).where(Job.owner == user))).all()
        size = await asyncio.to_thread(_bytes_below, [self._settings.jobs / name for name in names])
        self._measured[user] = time.monotonic(), size
        return size

    def _exceeded(self, left: int) -> ApiError:
        most = self._settings.max_user_bytes
        message = f"Your files and jobs may have {most:,} bytes; {max(0, left):,} are left."
        fix = "Delete files, models, or checkpoints of jobs that have ended."
        return ApiError(403, f"{message} {fix}", code="quota_exceeded")


def _bytes_below(folders: Iterable[Path]) -> int:
    """Return the size of all files in these folders; those that are removed meanwhile count nothing."""
    total = 0
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(place, name)).st_size
    return total


def _free_bytes(folder: Path) -> int:
    """Return the bytes that files may fill: the database and the runs of jobs need the rest."""
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
