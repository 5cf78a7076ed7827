"""Find the collective each rank of a hung run is in, from torch's flight recorder.

The recorder keeps the last collectives of a process in memory. The watchdog of a rank without progress writes the
relevant ones to a file (`engine.guard.watchdog`), which is read here, without torch. A rank waits for a peer if its
unfinished collective has not been started by that member of the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pantheraml.base.folders import write_text

_PREFIX = "collectives-rank-"

RECORDER_ENVIRONMENT = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Number of collectives to record: torch's own default, which older versions do not have."""


@dataclass(frozen=True)
class Collective:
    name: str
    number: int
    """Sequence number within the group, on this rank."""
    group: str
    paired: bool
    """Point-to-point, so other ranks do not count it."""
    done: bool
    begun_ns: int

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Collective:
        """Parse an entry of the recorder. Gloo never reports `completed`; NCCL does before it retires an entry."""
        group, description = entry["process_group"]
        return cls(
            name=entry["profiling_name"].partition(":")[2],
            number=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            group=group if description in ("", "undefined") else f"{group} ({description})",
            paired=entry["is_p2p"],
            done=entry["state"] == "completed" or entry["retired"],
            begun_ns=entry["time_created_ns"],
        )

    def __str__(self) -> str:
        return f"{self.name} {self.number} of group {self.group}"


@dataclass(frozen=True)
class RankRecord:
    """Unfinished collectives of one rank and the newest of every group, in start order."""

    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, collectives: Iterable[Collective]) -> RankRecord:
        ordered = sorted(collectives, key=lambda one: one.begun_ns)
        newest = {(one.group, one.paired): one for one in ordered}
        return cls(tuple(one for one in ordered if not one.done or newest[one.group, one.paired] is one))

    @property
    def current(self) -> Collective | None:
        """The first unfinished collective; later ones cannot run before it."""
        return next((one for one in self.collectives if not one.done), None)

    def begun(self, group: str) -> int | None:
        """Number of collectives of a group this rank has started; None: not known to be a member."""
        return max((one.number for one in self.collectives if one.group == group and not one.paired), default=None)

    def __str__(self) -> str:
        if self.current is not None:
            return f"in {self.current}"
        return f"past {self.collectives[-1]}"


def write_record(folder: Path, rank: int, record: RankRecord) -> None:
    """Write indented JSON, for people to read too; no file if there were no collectives."""
    if record.collectives:
        text = json.dumps([dataclasses.asdict(one) for one in record.collectives], indent=1)
        write_text(_path(folder, rank), text)


def remove_record(folder: Path, rank: int) -> None:
    _path(folder, rank).unlink(missing_ok=True)


def read_records(folder: Path) -> dict[int, RankRecord]:
    """Records by rank, of the ranks that wrote one."""
    records = {}
    for path in folder.glob(f"{_PREFIX}*.json"):
        with contextlib.suppress(FileNotFoundError):  # removed by a rank that has just made progress
            collectives = tuple(Collective(**one) for one in json.loads(path.read_text(encoding="utf-8")))
            records[int(path.stem.removeprefix(_PREFIX))] = RankRecord(collectives)
    return dict(sorted(records.items()))


def waits_for(records: Mapping[int, RankRecord]) -> dict[int, list[int]]:
    """Map each waiting rank to the peers that have not started its current collective."""
    waits = {}
    for rank, record in records.items():
        current = record.current
        if current is not None and not current.paired:
            begun = {peer: other.begun(current.group) for peer, other in records.items()}
            behind = [peer for peer, number in begun.items() if number is not None and number < current.number]
            if behind:
                waits[rank] = behind
    return waits


def describe_records(records: Mapping[int, RankRecord]) -> str | None:
    """Describe the position of every rank; None if there are no records."""
    positions: dict[str, list[int]] = {}
    for rank, record in records.items():
        positions.setdefault(str(record), []).append(rank)
    parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}" for text, ranks in positions.items()]
    return "; ".join(parts) or None


def name_ranks(ranks: Sequence[int]) -> str:
    """Format as "rank 3" or "ranks 0, 1 and 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{_PREFIX}{rank}.json"
