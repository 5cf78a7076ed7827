"""The collectives that this process has lately taken part in, from torch's flight recorders.

There is one recorder for NCCL, and one for the backends that need no GPU: a run on GPUs has groups of both kinds.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch._C import _distributed_c10d

from pantheraml.launch.flight_record import Collective, RankRecord


def recorded_collectives(backend: str) -> RankRecord:
    """Of a process whose main group is of `backend`."""
    found: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace") if backend == "nccl" else ("_dump_fr_trace",):
        # torch has no public name for these, nor a typed one; the second is there in its builds for GPUs alone
        found += pickle.loads(getattr(_distributed_c10d, name)(includeStackTraces=False)).get("entries", [])
    return RankRecord.of(map(Collective.from_entry, found))
