"""Whether ranks are stuck, and which one is: read from the stacks that they left (see `engine.guard.watch`).

Ranks that wait for a peer are inside a collective, in a backward pass that ends in one, or wait for a device that is in
one. A rank that is anywhere else is the one they wait for; so is one that left nothing, though it was there: a process
that is suspended, or whose machine is gone, writes no stacks.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pantheraml.launch.flight_record import RankRecord, named, read_records, tell, waits_for

DUMP_SHARE = 0.8
"""Of `parallel.timeout_seconds`, after which a rank that got no further writes its stacks."""
PATIENCE_SHARE = 0.4
"""The same, for how long the parent then waits: peers that came a little later leave theirs, too."""
COLLECTIVE_SHARE = 2.0
"""The same, for how long a collective may take. More than both together, so that it is the parent who ends a hang, and
says whose it was: NCCL ends the process that waits, by SIGABRT, and that is the wrong one."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/pantheraml/parallel/")
_WAITING_FOR_THE_DEVICE = (("/pantheraml/engine/step.py", "backward"), ("/pantheraml/engine/evaluate.py", "evaluate"))
"""Where the host reads numbers that the device has only after a collective."""
_TRAINS = ("/pantheraml/engine/loop.py", "/pantheraml/worker/train.py")
"""One of them is in the stack of every thread that trains."""
_WRITES = "/pantheraml/checkpoint/writer.py"
"""In that of a thread that writes a checkpoint, and of one that waits for it."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def waiting(self) -> bool:
        for_the_device = any(self.file.endswith(f) and self.function == name for f, name in _WAITING_FOR_THE_DEVICE)
        return for_the_device or any(part in self.file for part in _WAITING)

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}, line {self.line})"


@dataclass(frozen=True)
class Place:
    """Where a thread is."""

    frame: Frame
    ours: Frame
    """The innermost that is not a library's."""

    def __str__(self) -> str:
        return str(self.frame) if self.frame == self.ours else f"{self.frame}, called by {self.ours}"


class HangWatch:
    """Of the parent, which alone ends ranks that do not get on."""

    LOOK_SECONDS = 1.0

    def __init__(self, folder: Path, *, timeout_seconds: float) -> None:
        self._folder, self._patience = folder, PATIENCE_SHARE * timeout_seconds
        self._next_look = 0.0
        self._since: float | None = None

    def is_over(self) -> bool:
        """Whether some rank left its stacks and has not got on since, for too long."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + self.LOOK_SECONDS
        if not any(text.strip() for text in _stacks(self._folder).values()):
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > self._patience


def explain_hang(folder: Path) -> str | None:
    """What a hang was, if the stacks of at least one rank tell of one."""
    places = {rank: place_of(text) for rank, text in _stacks(folder).items()}
    known = {rank: place for rank, place in places.items() if place is not None}
    if not known:
        return None
    records = read_records(folder)
    waiting = [rank for rank, place in known.items() if _waits(rank, place, records)]
    stuck = [rank for rank in known if rank not in waiting]
    silent = [rank for rank in places if rank not in known]
    if stuck:
        said = "; ".join(f"rank {rank} is stuck in {known[rank]}" for rank in stuck) + _rest(waiting, stuck)
    elif silent:
        verb, they_are = ("has", "it is") if len(silent) == 1 else ("have", "they are")
        said = f"{named(silent)} {verb} left no stacks ({they_are} suspended, cut off or gone){_rest(waiting, silent)}"
    elif len(waiting) == 1:
        said = f"{named(waiting)} waits in {known[waiting[0]]}"
    else:
        said = f"{named(waiting)} wait for each other, rank {waiting[0]} in {known[waiting[0]]}"
    recorded = tell(records)
    by_recorder = "" if recorded is None else f" By torch's flight recorder, {recorded}."
    return f"The run does not get on: {said}.{by_recorder}"


def place_of(text: str) -> Place | None:
    """Where the thread that trains is, by the dump of all threads; None if there is no such thread."""
    threads = [
        [Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(thread)]
        for thread in re.split(r"\n(?=Thread |Current thread )", text)
    ]
    trains = next((frames for frames in threads if any(frame.file.endswith(_TRAINS) for frame in frames)), None)
    if trains is None:
        return None
    if any(frame.file.endswith(_WRITES) for frame in trains):  # what it waits for is the other thread that is there
        writes = (
            frames for frames in threads if frames is not trains and any(f.file.endswith(_WRITES) for f in frames)
        )
        trains = next(writes, trains)
    return Place(trains[0], next(frame for frame in trains if "/pantheraml/" in frame.file))


def _waits(rank: int, place: Place, records: Mapping[int, RankRecord]) -> bool:
    """Whether it waits for others: what the recorder says counts for more than where the host is."""
    waits = waits_for(records)
    if rank in waits:
        return True
    is_waited_for = any(rank in behind for behind in waits.values())
    if is_waited_for and records[rank].current is None:
        return False
    return place.frame.waiting


def _rest(waiting: Sequence[int], them: Sequence[int]) -> str:
    if not waiting:
        return ""
    return f", and {named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {'it' if len(them) == 1 else 'them'}"


def _stacks(folder: Path) -> dict[int, str]:
    """By rank, of all who are watched; empty where one got on."""
    found = {}
    for path in folder.glob("rank-*.txt"):
        with contextlib.suppress(FileNotFoundError):  # of a rank that has just come to its end
            found[int(path.stem.removeprefix("rank-"))] = path.read_text(encoding="utf-8", errors="replace")
    return dict(sorted(found.items()))
