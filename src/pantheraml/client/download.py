"""Resumable downloads: what was received before a connection, or this program, ended is not fetched again.

The partial file is next to the target, named after the version of the content (its ETag), and is renamed to the target
once complete.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2

from pantheraml.base.errors import ServiceError, StorageError

_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")


@dataclass
class Download:
    """A partial download of `target`."""

    target: Path
    etag: str | None = None
    total: int | None = None

    @property
    def part(self) -> Path:
        mark = hashlib.sha256((self.etag or "none").encode()).hexdigest()[:12]
        return self.target.with_name(f".{self.target.name}.{mark}.part")

    @property
    def have(self) -> int:
        """Bytes that are there, and that this user wrote: in a folder that others can write to, they may have put a
        file there."""
        try:
            status = self.part.lstat()
        except OSError:
            return 0
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return status.st_size if self.etag is not None and own else 0

    def open(self, offset: int = 0) -> BinaryIO:
        """Open the piece to go on at `offset`, or anew; a link is not followed."""
        if offset:
            return open(self.part, "ab", opener=_open_nofollow)
        self.part.unlink(missing_ok=True)
        return open(self.part, "xb", opener=_open_nofollow)

    def headers(self) -> dict[str, str]:
        """Headers of the next request. The first one asks for one byte, to learn the version."""
        if self.etag is None:
            return {"range": "bytes=0-0"}
        return {"range": f"bytes={self.have}-", "if-range": self.etag} if self.have and self.etag else {}

    def learn(self, response: httpx2.Response) -> None:
        """Note version and size from the answer to the first request."""
        self.etag = response.headers.get("etag") or ""
        self.total = _total(response)
        if not self.etag:  # the partial file may be of another version
            self.part.unlink(missing_ok=True)

    @property
    def is_whole(self) -> bool:
        return self.total is not None and self.have == self.total

    def begin(self, response: httpx2.Response) -> int:
        """Return the offset of the bytes in this response."""
        if response.status_code != 206:
            self.etag, self.total = response.headers.get("etag") or "", _length(response)
            return 0
        found = _RANGE.fullmatch(response.headers.get("content-range", ""))
        if found is None or int(found[1]) != self.have:
            raise ServiceError(
                "The service sent another range than was asked for.",
                status=response.status_code,
                fix="Download it again; a proxy on the way may change ranges.",
            )
        return int(found[1])

    def finish(self) -> Path:
        """Rename it to the target. StorageError if it is incomplete."""
        size = self.part.stat().st_size
        if self.total is not None and size != self.total:
            raise StorageError(f"{self.target} has {size:,} of {self.total:,} bytes.", fix="Start the download again.")
        for other in self.target.parent.glob(f".{_literal(self.target.name)}.*.part"):
            if other != self.part:
                other.unlink(missing_ok=True)  # of another version
        self.part.replace(self.target)
        return self.target


def _open_nofollow(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _literal(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _total(response: httpx2.Response) -> int | None:
    found = _RANGE.fullmatch(response.headers.get("content-range", ""))
    return int(found[2]) if found else _length(response)


def _length(response: httpx2.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isdigit() else None
