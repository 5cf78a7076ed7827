"""Authenticated values in a key-value store that others may reach.

A store that listens on a network accepts keys from anyone who connects. With a run token (`launch.run_token`), every
value carries an HMAC-SHA256 over its prefix, key and content, and a value with a wrong HMAC is an error and never used.
Without a token values are not authenticated: that is for a FileStore that only the user can access.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pantheraml.base.errors import LaunchError

_NO_SEAL = b"-" * 64


class SealedStore:
    """Keys of `store` below `prefix`, with authenticated values."""

    def __init__(self, store: Store, prefix: str, token: str | None) -> None:
        self.raw: Store = PrefixStore(prefix, store)
        """Unauthenticated view, for torch's process groups."""
        self._prefix, self._token = prefix, token

    def set(self, key: str, value: str) -> None:
        self.raw.set(key, (self._seal(key, value.encode()) + value.encode()).decode())

    def get(self, key: str) -> bytes:
        value = self.get_verified(key)
        if value is None:
            raise LaunchError(
                f"The value of `{key}` in the store was not written by a process of this run, and is rejected.",
                fix="Let only the nodes of this run reach its port (docs/launching.md, a private network).",
            )
        return value

    def get_verified(self, key: str) -> bytes | None:
        """Return the value, or None if its writer did not have this run's token."""
        with _uniform_errors():
            raw: bytes = self.raw.get(key)
        seal, value = raw[: len(_NO_SEAL)], raw[len(_NO_SEAL) :]
        return value if hmac.compare_digest(seal, self._seal(key, value)) else None

    def check(self, keys: Sequence[str]) -> bool:
        return self.raw.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta) -> None:
        with _uniform_errors():
            self.raw.wait(list(keys), timeout)

    def _seal(self, key: str, value: bytes) -> bytes:
        if self._token is None:
            return _NO_SEAL
        message = b"\0".join((self._prefix.encode(), key.encode(), value))
        return hmac.new(self._token.encode(), message, hashlib.sha256).hexdigest().encode()


@contextmanager
def _uniform_errors() -> Iterator[None]:
    """Turn the plain RuntimeError that FileStore raises on timeout into DistStoreError, as other stores raise."""
    try:
        yield
    except dist.DistError:
        raise
    except RuntimeError as err:
        raise dist.DistStoreError(str(err)) from err
