"""Sample order: which sequences make up global step k.

The training stream is the infinite concatenation of one permutation of the data set per epoch. With global batch size
G, step k takes positions [k*G, (k+1)*G), so its samples are a pure function of (fingerprint, seed, k), independent of
world size, gradient accumulation and restarts. A resumed run only needs the step.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


def step_samples(
    fingerprint: str, seed: int, size: int, global_batch: int, step: int, limit: int | None = None
) -> NDArray[np.int64]:
    """Return the sequence ids of global step `step` (counted from 0) over a data set of `size` sequences.

    `limit` is the length of the stream when training ends after a number of epochs: the last batch may be short, and
    steps beyond it are empty.
    """
    if size < 1:
        raise ValueError("the data set is empty")
    start = step * global_batch
    stop = start + global_batch
    if limit is not None:
        stop = min(stop, limit)
    parts: list[NDArray[np.int64]] = []
    while start < stop:
        epoch, offset = divmod(start, size)
        part = _epoch_order(fingerprint, seed, epoch, size)[offset : offset + stop - start]
        parts.append(part)
        start += len(part)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


@lru_cache(maxsize=2)  # a batch touches at most two epochs unless the data set is smaller than a batch
def _epoch_order(fingerprint: str, seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """Return the permutation of one epoch.

    Sorts raw Philox output instead of using `Generator.permutation`: NumPy keeps the raw stream of a bit generator
    stable across versions, but not the methods built on it, and an upgrade must not change the order of a resumed run.
    """
    key = hashlib.blake2b(f"{fingerprint}/{seed}/{epoch}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size)
    order = np.argsort(raw, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order
