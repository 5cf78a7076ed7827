"""Values in a store that others may reach: each carries a seal that only processes of this run can make.

A store that listens on a network takes keys from whoever connects. With a run token (`launch.run_token`) every value
is sealed by HMAC-SHA256 over its place and its text, and one whose seal is wrong is an error and is not used. Without a
token values are as they are: that is for a store in a file that only the user can reach.
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
    """The part of `store` below `prefix`, with sealed values."""

    def __init__(self, store: Store, prefix: str, token: str | None) -> None:
        self.raw: Store = PrefixStore(prefix, store)
        """For torch's process groups, which have no seals."""
        self._prefix, self._token = prefix, token

    def set(self, key: str, value: str) -> None:
        self.raw.set(key, (self._seal(key, value.encode()) + value.encode()).decode())

    def get(self, key: str) -> bytes:
        value = self.get_if_ours(key)
        if value is None:
            raise LaunchError(
                f"The value of `{key}` in the store was not written by a process of this run, and is not used.",
                todo="See that only the nodes of this run reach its port (docs/launching.md, a private network).",
            )
        return value

    def get_if_ours(self, key: str) -> bytes | None:
        """None: somebody wrote it who does not have the token of this process."""
        with _own_errors():
            found: bytes = self.raw.get(key)
        seal, value = found[: len(_NO_SEAL)], found[len(_NO_SEAL) :]
        return value if hmac.compare_digest(seal, self._seal(key, value)) else None

    def check(self, keys: Sequence[str]) -> bool:
        return self.raw.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta) -> None:
        with _own_errors():
            self.raw.wait(list(keys), timeout)

    def _seal(self, key: str, value: bytes) -> bytes:
        if self._token is None:
            return _NO_SEAL
        said = b"\0".join((self._prefix.encode(), key.encode(), value))
        return hmac.new(self._token.encode(), said, hashlib.sha256).hexdigest().encode()


@contextmanager
def _own_errors() -> Iterator[None]:
    """A store in a file tells a timeout by a plain RuntimeError, the others by a DistStoreError."""
    try:
        yield
    except dist.DistError:
        raise
    except RuntimeError as err:
        raise dist.DistStoreError(str(err)) from err
