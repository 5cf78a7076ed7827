"""Coordination of the node agents of a multi-node run, through the store of node 0.

For each (re)start of the run the agents rendezvous anew and get a fresh key prefix. Each posts how many ranks it has
and later how they ended; node 0 decides and all follow. An agent that was restarted in the meantime, after its node
came back, joins the next rendezvous like the others.
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
from pantheraml.launch.nodes import Assignment
from pantheraml.launch.outcomes import Outcome, RestartDecision
from pantheraml.rendezvous.join_store import NODES, Deadline, join_store

POLL_SECONDS = 0.1
ANSWER_SECONDS = 30.0
"""Seconds a live node may take to end its ranks and report, after ranks of another node failed."""


@dataclass(frozen=True)
class LocalRanks:
    """First global rank of this node, its number of ranks, and the world size."""

    first: int
    here: int
    all: int


class NodeRendezvous:
    """Rendezvous of all nodes for one start of the run; the store lives as long as node 0 holds it."""

    def __init__(self, assignment: Assignment) -> None:
        self._node = node = assignment.node
        self._timeout_seconds = assignment.timeout_seconds
        self._store = join_store(
            env.ProcessRank(node.number, 0, node.count),
            env.StoreAddress(node.host, node.port, hosted_by_agent=False, attempt=0),
            timeout_seconds=assignment.timeout_seconds,
            max_retries=assignment.max_retries,
            who=NODES,
        )
        self._lost = False
        with self._requiring_node_0():
            self._store.set(f"processes/{node.number}", str(assignment.processes))
            counts = [int(self._store.get(f"processes/{number}")) for number in range(node.count)]
        self.ranks = LocalRanks(sum(counts[: node.number]), counts[node.number], sum(counts))

    def agree_on_start(self, number: int, restarted: str | None) -> tuple[int, str | None]:
        """Return node 0's start number and restart reason; an agent may have been restarted during the run."""
        with self._requiring_node_0():
            if self._node.number == 0:
                self._store.set("start", f"{number} {restarted or ''}")
            agreed_number, _, reason = self._store.get("start").decode().partition(" ")
        return int(agreed_number), reason or None

    def tell(self, outcome: Outcome) -> None:
        """Report how this node's ranks ended. Does nothing if node 0 is gone."""
        try:
            if outcome.is_failure:
                self._store.set("failed", "")
            self._store.set(f"outcome/{self._node.number}", outcome.to_json())
        except dist.DistError:
            self._lost = True

    def others_failed(self) -> bool:
        """Return True if ranks of any node failed.

        False if node 0 is gone: this node's ranks notice by themselves, and save or lose their connection.
        """
        try:
            return not self._lost and self._store.check(["failed"]) and self._store.get("failed") == b""
        except dist.DistError:
            self._lost = True
            return False

    def verdict(
        self, judge: Callable[[dict[int, Outcome | None]], RestartDecision], hurry: Callable[[], bool]
    ) -> RestartDecision | None:
        """Return what all nodes do next: node 0 collects the outcomes and judges, the others wait for its verdict.

        None if `hurry` returned True before the verdict was there.
        """
        with self._requiring_node_0():
            if self._node.number > 0:
                self._wait(["verdict"], math.inf, hurry)
                received = self._store.get("verdict") if self._store.check(["verdict"]) else None
                self._store.set(f"read/{self._node.number}", "")
                return None if received is None else RestartDecision.from_json(received)
            outcomes = self._outcomes(hurry)
            verdict = judge(outcomes)
            self._store.set("verdict", verdict.to_json())
            if not verdict.restarts_run:  # the store ends with this process, so wait for readers
                alive = [number for number, outcome in outcomes.items() if outcome is not None and number > 0]
                self._wait([f"read/{number}" for number in alive], ANSWER_SECONDS, hurry)
            return verdict

    def _outcomes(self, hurry: Callable[[], bool]) -> dict[int, Outcome | None]:
        keys = {number: f"outcome/{number}" for number in range(self._node.count)}
        # on success the other nodes end soon too; on failure they end their ranks, and some nodes may be gone
        self._wait(list(keys.values()), self._timeout_seconds, lambda: hurry() or self.others_failed())
        if not self._store.check(list(keys.values())):
            self._store.set("failed", "")
            self._wait(list(keys.values()), ANSWER_SECONDS, hurry)
        return {
            number: Outcome.from_json(self._store.get(key)) if self._store.check([key]) else None
            for number, key in keys.items()
        }

    def _wait(self, keys: list[str], seconds: float, hurry: Callable[[], bool]) -> None:
        """Poll for keys; the store's own `wait` cannot be interrupted."""
        deadline = Deadline(seconds)
        while keys and not self._store.check(keys) and deadline.left > 0 and not hurry():
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _requiring_node_0(self) -> Iterator[None]:
        try:
            if self._lost:
                raise dist.DistNetworkError("lost before")
            yield
        except dist.DistError as err:
            raise LaunchError(
                f"Node {self._node.number} lost the store at {self._node.host}:{self._node.port}: node 0 is gone.",
                fix="Check the log of node 0, then start the run again with --resume on all nodes.",
            ) from err
