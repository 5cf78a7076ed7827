"""Which collective each rank was in: read from what torch's flight recorder leaves when NCCL gives up waiting.

The recorder keeps the last collectives of a process in memory and, told so by the environment, writes them to a file
when one runs into its timeout: a pickle of plain lists and dictionaries, which is read here without torch. A rank that
is behind the others in the count of collectives is the one they wait for.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "collectives-rank-"
KEPT = 2000
"""Collectives that are remembered; torch's own default, which older versions do not have."""


@dataclass(frozen=True)
class LastCollective:
    """The newest one that a rank had begun, or was about to."""

    name: str
    number: int
    """How many its group had begun by then."""
    group: str
    done: bool

    def __str__(self) -> str:
        return f"{'has done' if self.done else 'is in'} {self.name} {self.number}"


def recorder_environment(folder: Path) -> dict[str, str]:
    """What tells the recorder to write into `folder`."""
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": str(KEPT),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / PREFIX),  # torch appends the rank
    }


def last_collectives(folder: Path) -> dict[int, LastCollective]:
    """By rank, where the recorder left something that can be read."""
    found = {}
    for path in folder.glob(f"{PREFIX}*"):
        rank, last = path.name.removeprefix(PREFIX), _last(path)
        if rank.isdigit() and last is not None:
            found[int(rank)] = last
    return dict(sorted(found.items()))


def explain_difference(last: dict[int, LastCollective]) -> str | None:
    """Who is behind whom, among ranks whose last collective was of one group; None if nobody is."""
    if len({one.group for one in last.values()}) > 1 or len({(one.number, one.name) for one in last.values()}) < 2:
        return None
    return "; ".join(f"rank {rank} {one}" for rank, one in last.items())


class _Plain(pickle.Unpickler):
    """Reads containers, numbers and texts, and nothing that could run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} does not belong into a flight record")


def _last(path: Path) -> LastCollective | None:
    try:
        with open(path, "rb") as file:
            entries = _Plain(file).load()["entries"]
        entry = max(entries, key=lambda one: one["record_id"])
        return LastCollective(
            name=entry["profiling_name"].partition(":")[2],
            number=entry["collective_seq_id"],
            group=str(entry["process_group"]),
            done=entry["state"] == "completed" or entry["retired"],
        )
    except (OSError, EOFError, pickle.UnpicklingError, KeyError, ValueError, TypeError):
        return None  # a process that is being killed may leave half a file, and stacks tell the rest
