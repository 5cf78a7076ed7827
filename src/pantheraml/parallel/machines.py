"""What the agents of several machines say to each other, through the store of machine 0.

For each start of the run they meet anew and get a fresh part of the store. There each says how many ranks it has and,
later, how they ended; machine 0 judges, and all do as it says. An agent that was started anew in the meantime, after
its machine came back, takes part in the next meeting like the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from pantheraml.base import env
from pantheraml.base.errors import LaunchError
from pantheraml.launch.machines import Assignment
from pantheraml.launch.outcomes import Outcome, Verdict
from pantheraml.parallel.rendezvous import MACHINES, Deadline, meet

POLL_SECONDS = 0.1
ANSWER_SECONDS = 30.0
"""How long a machine that lives may take to end its ranks and to say so, once those of another have ended badly."""


@dataclass(frozen=True)
class RanksHere:
    """The ranks of one machine among all of a run."""

    first: int
    here: int
    all: int


class Meeting:
    """The machines of a run at the beginning of one start of it; the store lasts as long as that of machine 0."""

    def __init__(self, assignment: Assignment) -> None:
        self._machine = machine = assignment.machine
        self._timeout_seconds = assignment.timeout_seconds
        self._store = meet(
            env.ProcessRank(machine.number, 0, machine.count),
            env.StoreAddress(machine.host, machine.port, hosted_by_agent=False, attempt=0),
            timeout_seconds=assignment.timeout_seconds,
            max_retries=assignment.max_retries,
            who=MACHINES,
        )
        self._lost = False
        with self._reaching_machine_0():
            self._store.set(f"processes/{machine.number}", str(assignment.processes))
            counts = [int(self._store.get(f"processes/{number}")) for number in range(machine.count)]
        self.ranks = RanksHere(sum(counts[: machine.number]), counts[machine.number], sum(counts))

    def agree_on_start(self, number: int, restarted: str | None) -> tuple[int, str | None]:
        """Which start this is, and what it continues, as machine 0 says: an agent may be younger than the run."""
        with self._reaching_machine_0():
            if self._machine.number == 0:
                self._store.set("start", f"{number} {restarted or ''}")
            told, _, because = self._store.get("start").decode().partition(" ")
        return int(told), because or None

    def tell(self, outcome: Outcome) -> None:
        """How this machine's ranks ended. If machine 0 is gone, there is nobody to tell."""
        try:
            if outcome.ended_badly:
                self._store.set("failed", "")
            self._store.set(f"outcome/{self._machine.number}", outcome.to_json())
        except dist.DistError:
            self._lost = True

    def others_failed(self) -> bool:
        """Whether ranks of any machine ended badly. If machine 0 is gone, this machine's own ranks will notice: they
        save, or lose their connection, in their own time."""
        try:
            return not self._lost and self._store.check(["failed"]) and self._store.get("failed") == b""
        except dist.DistError:
            self._lost = True
            return False

    def verdict(
        self, judge: Callable[[dict[int, Outcome | None]], Verdict], hurry: Callable[[], bool]
    ) -> Verdict | None:
        """What all machines do next: machine 0 hears all and judges, the others wait for that; None: this one was in
        too much of a `hurry` for it."""
        with self._reaching_machine_0():
            if self._machine.number > 0:
                self._wait(["verdict"], math.inf, hurry)
                told = self._store.get("verdict") if self._store.check(["verdict"]) else None
                self._store.set(f"read/{self._machine.number}", "")
                return None if told is None else Verdict.from_json(told)
            outcomes = self._outcomes(hurry)
            verdict = judge(outcomes)
            self._store.set("verdict", verdict.to_json())
            if not verdict.starts_again:  # the store ends with this process
                alive = [number for number, outcome in outcomes.items() if outcome is not None and number > 0]
                self._wait([f"read/{number}" for number in alive], ANSWER_SECONDS, hurry)
            return verdict

    def _outcomes(self, hurry: Callable[[], bool]) -> dict[int, Outcome | None]:
        keys = {number: f"outcome/{number}" for number in range(self._machine.count)}
        # if all went well the others are about to end too; if not, they end their ranks, and some may not live any more
        self._wait(list(keys.values()), self._timeout_seconds, lambda: hurry() or self.others_failed())
        if not self._store.check(list(keys.values())):
            self._store.set("failed", "")
            self._wait(list(keys.values()), ANSWER_SECONDS, hurry)
        return {
            number: Outcome.from_json(self._store.get(key)) if self._store.check([key]) else None
            for number, key in keys.items()
        }

    def _wait(self, keys: list[str], seconds: float, hurry: Callable[[], bool]) -> None:
        """Not the store's own `wait`, which nothing can interrupt."""
        deadline = Deadline(seconds)
        while keys and not self._store.check(keys) and deadline.left > 0 and not hurry():
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _reaching_machine_0(self) -> Iterator[None]:
        try:
            if self._lost:
                raise dist.DistNetworkError("lost before")
            yield
        except dist.DistError as err:
            raise LaunchError(
                f"Machine {self._machine.number} lost the store at {self._machine.host}:{self._machine.port}: machine 0"
                " is gone.",
                todo="Its own message says why. Start the run again with --resume on all machines.",
            ) from err
