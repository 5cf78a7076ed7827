"""Which rank is stuck: read from the stacks that ranks left (see `engine.guard.watch`).

Ranks that wait for a peer are inside a collective, or in a backward pass that ends in one. A rank that is anywhere else
is the one they wait for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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


def explain_hang(folder: Path) -> str | None:
    """What a hang was, if the stacks of at least one rank tell of one."""
    places = {rank: frame for rank, text in _stacks(folder).items() if (frame := innermost(text)) is not None}
    if not places:
        return None
    stuck = {rank: frame for rank, frame in places.items() if not frame.waiting}
    waiting = sorted(rank for rank, frame in places.items() if frame.waiting)
    if not stuck:
        return f"Ranks {_listed(waiting)} wait for each other, or for one that is gone, in {places[waiting[0]]}."
    told = "; ".join(f"rank {rank} is stuck in {frame}" for rank, frame in sorted(stuck.items()))
    rest = f", and rank {_listed(waiting)} waits for it" if waiting else ""
    return f"The run does not get on: {told}{rest}."


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
