"""Which collective each rank of a run that does not get on is in, as told by torch's flight recorder.

The recorder keeps the last collectives of a process in memory. A rank that gets no further writes those that matter to
a file (`engine.guard.collectives`), which is read here, without torch. A rank whose unfinished collective some other
member of its group has not begun waits for that one.
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
"""Collectives that are remembered: torch's own default, which older versions do not have."""


@dataclass(frozen=True)
class Collective:
    name: str
    number: int
    """How many its group had begun by then, on this rank."""
    group: str
    paired: bool
    """Only between two ranks, and so not counted by the others."""
    done: bool
    begun_ns: int

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Collective:
        """From the recorder's own form. Gloo never says `completed`, NCCL does before it retires."""
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
    """Of one rank: the collectives that are not done, and the newest of every group; in the order they began."""

    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, collectives: Iterable[Collective]) -> RankRecord:
        ordered = sorted(collectives, key=lambda one: one.begun_ns)
        newest = {(one.group, one.paired): one for one in ordered}
        return cls(tuple(one for one in ordered if not one.done or newest[one.group, one.paired] is one))

    @property
    def current(self) -> Collective | None:
        """The one that this rank is in: those behind it cannot begin."""
        return next((one for one in self.collectives if not one.done), None)

    def begun(self, group: str) -> int | None:
        """How many collectives of a group this rank has begun; None: it is not known to be a member."""
        return max((one.number for one in self.collectives if one.group == group and not one.paired), default=None)

    def __str__(self) -> str:
        if self.current is not None:
            return f"in {self.current}"
        return f"past {self.collectives[-1]}"


def write_record(folder: Path, rank: int, record: RankRecord) -> None:
    """So that people can read it too; nothing if there were no collectives."""
    if record.collectives:
        text = json.dumps([dataclasses.asdict(one) for one in record.collectives], indent=1)
        write_text(_path(folder, rank), text)


def remove_record(folder: Path, rank: int) -> None:
    _path(folder, rank).unlink(missing_ok=True)


def read_records(folder: Path) -> dict[int, RankRecord]:
    """By rank, of those who left one."""
    found = {}
    for path in folder.glob(f"{_PREFIX}*.json"):
        with contextlib.suppress(FileNotFoundError):  # of a rank that has just got on
            collectives = tuple(Collective(**one) for one in json.loads(path.read_text(encoding="utf-8")))
            found[int(path.stem.removeprefix(_PREFIX))] = RankRecord(collectives)
    return dict(sorted(found.items()))


def waits_for(records: Mapping[int, RankRecord]) -> dict[int, list[int]]:
    """Rank -> those who have not begun the collective that it is in."""
    found = {}
    for rank, record in records.items():
        current = record.current
        if current is not None and not current.paired:
            begun = {peer: other.begun(current.group) for peer, other in records.items()}
            behind = [peer for peer, number in begun.items() if number is not None and number < current.number]
            if behind:
                found[rank] = behind
    return found


def tell(records: Mapping[int, RankRecord]) -> str | None:
    """Where everybody is; None if nobody left a record."""
    places: dict[str, list[int]] = {}
    for rank, record in records.items():
        places.setdefault(str(record), []).append(rank)
    told = "; ".join(f"{named(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}" for place, ranks in places.items())
    return told or None


def named(ranks: Sequence[int]) -> str:
    """Such as: rank 3; ranks 0, 1 and 2."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _path(folder: Path, rank: int) -> Path:
    return folder / f"{_PREFIX}{rank}.json"
