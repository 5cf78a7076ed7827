"""Detect a hang and name the stuck rank, from the stack dumps of the ranks (see `engine.guard.watchdog`).

A rank that waits for a peer is inside a collective, in a backward pass that ends in one, or waiting for a device that
is in one. A rank anywhere else is the one they wait for. So is a rank without a stack dump: a suspended process, or one
on a lost node, writes none.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pantheraml.launch.flight_record import RankRecord, describe_records, name_ranks, read_records, waits_for

DUMP_SHARE = 0.8
"""Time without progress after which a rank dumps its stacks, relative to `parallel.timeout_seconds`."""
PATIENCE_SHARE = 0.4
"""Time the parent then waits, relative to the same: peers that got stuck a little later dump theirs, too."""
COLLECTIVE_SHARE = 2.0
"""Timeout of a collective, relative to the same. Longer than both together, so that the parent ends a hang and names
the stuck rank: NCCL would end the waiting process by SIGABRT, which is the wrong one."""

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/cuda/", "/pantheraml/parallel/")
_WAITING_FOR_DEVICE = (
    ("/pantheraml/engine/step/async_readback.py", "read"),
    ("/pantheraml/engine/step/step.py", "finish"),
    ("/pantheraml/engine/evaluate.py", "evaluate"),
)
"""Functions in which the host reads values that the device has only after a collective."""
_TRAINING_FILES = ("/pantheraml/engine/loop.py", "/pantheraml/worker/train.py")
"""One of them is in the stack of every training thread."""
_WRITER_FILE = "/pantheraml/checkpoint/writer.py"
"""In the stack of the checkpoint writer thread, and of a thread that waits for it."""


@dataclass(frozen=True)
class StackFrame:
    file: str
    line: int
    function: str

    @property
    def waiting(self) -> bool:
        for_device = any(self.file.endswith(f) and self.function == name for f, name in _WAITING_FOR_DEVICE)
        return for_device or any(part in self.file for part in _WAITING)

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}, line {self.line})"


@dataclass(frozen=True)
class StackPosition:
    """Position of a thread."""

    frame: StackFrame
    """The innermost frame."""
    ours: StackFrame
    """The innermost frame in this package."""

    def __str__(self) -> str:
        return str(self.frame) if self.frame == self.ours else f"{self.frame}, called by {self.ours}"


class HangWatch:
    """Hang detection of the parent, which alone ends stuck ranks."""

    CHECK_SECONDS = 1.0

    def __init__(self, folder: Path, *, timeout_seconds: float) -> None:
        self._folder, self._patience = folder, PATIENCE_SHARE * timeout_seconds
        self._next_check = 0.0
        self._since: float | None = None

    def is_hung(self) -> bool:
        """True once a rank has made no progress for too long since its stack dump."""
        now = time.monotonic()
        if now < self._next_check:
            return False
        self._next_check = now + self.CHECK_SECONDS
        if not any(text.strip() for text in _stacks(self._folder).values()):
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > self._patience


def explain_hang(folder: Path) -> str | None:
    """Describe a hang; None unless at least one rank dumped the stack of its training thread."""
    positions = {rank: stack_position(text) for rank, text in _stacks(folder).items()}
    known = {rank: position for rank, position in positions.items() if position is not None}
    if not known:
        return None
    records = read_records(folder)
    waiting = [rank for rank, position in known.items() if _waits(rank, position, records)]
    stuck = [rank for rank in known if rank not in waiting]
    missing = [rank for rank in positions if rank not in known]
    if stuck:
        reason = "; ".join(f"rank {rank} is stuck in {known[rank]}" for rank in stuck) + _waiters(waiting, stuck)
    elif missing:
        verb, they_are = ("has", "it is") if len(missing) == 1 else ("have", "they are")
        cause = f"{they_are} suspended, unreachable or dead"
        reason = f"{name_ranks(missing)} {verb} written no stack dump ({cause}){_waiters(waiting, missing)}"
    elif len(waiting) == 1:
        reason = f"{name_ranks(waiting)} waits in {known[waiting[0]]}"
    else:
        reason = f"{name_ranks(waiting)} wait for each other, rank {waiting[0]} in {known[waiting[0]]}"
    recorded = describe_records(records)
    collectives = "" if recorded is None else f" According to torch's flight recorder, {recorded}."
    return f"No rank is making progress: {reason}.{collectives}"


def stack_position(text: str) -> StackPosition | None:
    """Find the training thread in a dump of all threads; None if it is not there."""
    threads = [
        [StackFrame(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(thread)]
        for thread in re.split(r"\n(?=Thread |Current thread )", text)
    ]
    training = next((frames for frames in threads if any(f.file.endswith(_TRAINING_FILES) for f in frames)), None)
    if training is None:
        return None
    if any(frame.file.endswith(_WRITER_FILE) for frame in training):  # it waits for the checkpoint writer thread
        writers = (
            frames
            for frames in threads
            if frames is not training and any(f.file.endswith(_WRITER_FILE) for f in frames)
        )
        training = next(writers, training)
    return StackPosition(training[0], next(frame for frame in training if "/pantheraml/" in frame.file))


def _waits(rank: int, position: StackPosition, records: Mapping[int, RankRecord]) -> bool:
    """True if the rank waits for peers. The flight recorder takes precedence over the Python stack."""
    waits = waits_for(records)
    if rank in waits:
        return True
    is_waited_for = any(rank in behind for behind in waits.values())
    if is_waited_for and records[rank].current is None:
        return False
    return position.frame.waiting


def _waiters(waiting: Sequence[int], awaited: Sequence[int]) -> str:
    if not waiting:
        return ""
    verb, them = "waits" if len(waiting) == 1 else "wait", "it" if len(awaited) == 1 else "them"
    return f", and {name_ranks(waiting)} {verb} for {them}"


def _stacks(folder: Path) -> dict[int, str]:
    """Stack dumps of all watched ranks; empty for a rank that is making progress."""
    stacks = {}
    for path in folder.glob("rank-*.txt"):
        with contextlib.suppress(FileNotFoundError):  # removed by a rank that has just exited
            stacks[int(path.stem.removeprefix("rank-"))] = path.read_text(encoding="utf-8", errors="replace")
    return dict(sorted(stacks.items()))
