"""Whether ranks are stuck, and which one is: read from the stacks that they left (see `engine.guard.watch`).

Ranks that wait for a peer are inside a collective, or in a backward pass that ends in one. A rank that is anywhere else
is the one they wait for.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from pantheraml.launch.flight_record import explain_difference, last_collectives

DUMP_SHARE = 0.8
"""Of `parallel.timeout_seconds`, after which a rank that got no further writes its stacks: before its peers give up."""
PATIENCE_SHARE = 0.4
"""The same, for how long the parent then waits: a little longer than peers do, whose own end tells more."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/parallel/process_group.py")
_OURS = "/pantheraml/engine/loop.py"
"""In the stack of every thread that trains."""


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    @property
    def waiting(self) -> bool:
        return any(part in self.file for part in _WAITING)

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}, line {self.line})"


class HangWatch:
    """Of the parent, over ranks that have nobody who gives up waiting for them."""

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
        if not _stacks(self._folder):
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > self._patience


def explain_hang(folder: Path) -> str | None:
    """What a hang was, if the stacks of at least one rank tell of one."""
    places = {rank: frame for rank, text in _stacks(folder).items() if (frame := innermost(text)) is not None}
    if not places:
        return None
    difference = explain_difference(last_collectives(folder))
    recorded = "" if difference is None else f" By torch's flight recorder, {difference}."
    stuck = {rank: frame for rank, frame in places.items() if not frame.waiting}
    waiting = sorted(rank for rank, frame in places.items() if frame.waiting)
    if not stuck:
        gone = f"Ranks {_listed(waiting)} wait for each other, or for one that is gone, in {places[waiting[0]]}."
        return f"{gone}{recorded}"
    told = "; ".join(f"rank {rank} is stuck in {frame}" for rank, frame in sorted(stuck.items()))
    rest = f", and rank {_listed(waiting)} waits for it" if waiting else ""
    return f"The run does not get on: {told}{rest}.{recorded}"


def innermost(text: str) -> Frame | None:
    """Where the thread that trains is, by the dump of all threads; None if there is no such thread."""
    for thread in re.split(r"\n(?=Thread |Current thread )", text):
        frames = [Frame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(thread)]
        if any(frame.file.endswith(_OURS) for frame in frames):
            return frames[0]
    return None


def _stacks(folder: Path) -> dict[int, str]:
    found = {}
    for path in sorted(folder.glob("rank-*.txt")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text.strip():
            found[int(path.stem.removeprefix("rank-"))] = text
    return found


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
