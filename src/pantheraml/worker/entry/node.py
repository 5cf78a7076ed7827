"""`python -m pantheraml.worker.entry node ASSIGNMENT COMMAND...`: agent of one node of a multi-node run.

The rendezvous comes first, so that a missing node is named in time. When a rank fails on any node, all nodes end their
ranks, repeat the rendezvous and run the same command, which resumes from the last checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pantheraml.base import env, log
from pantheraml.base.errors import InterruptedRunError, PantheraError
from pantheraml.launch.local import StopRequests
from pantheraml.launch.nodes import Assignment
from pantheraml.launch.outcomes import STOPS, NodeRestarts
from pantheraml.launch.rank_processes import RankWatch, run_ranks
from pantheraml.launch.run_token import shared_token
from pantheraml.rendezvous.node_rendezvous import LocalRanks, NodeRendezvous
from pantheraml.specs.run_dir import RunDir


def run_node(assignment: Assignment, command: list[str]) -> int:
    """Run to the end and return the exit code: the same on all nodes, except those stopped by a signal."""
    run = RunDir(Path(assignment.run))
    restarts = NodeRestarts(run, restart_on=assignment.restart_on, max_retries=assignment.max_retries)
    number, restarted, meeting = 0, None, None
    while True:
        # The first meeting hosts the store, so each is kept until the next one has begun.
        meeting = NodeRendezvous(assignment)
        number, restarted = meeting.agree_on_start(number, restarted)
        with StopRequests().installed() as stops:
            watch = RankWatch(stops, assignment.grace_seconds, meeting.others_failed, meeting.tell)
            environments = _environments(assignment, meeting.ranks, number, restarted)
            run_ranks(command, environments, meeting.ranks.first, watch)
            # node 0 hosts the store, which the others need for the decision
            hurry = (lambda: stops.urgent) if assignment.node.number == 0 else (lambda: stops.count > 0)
            decision = meeting.verdict(restarts.decide, hurry)
        if stops.first is not None:
            return STOPS[stops.first]
        assert decision is not None, "only a stop request skips the decision"
        if decision.message and not (decision.resumes and assignment.node.number == 0):  # there the run prints it
            print(decision.message, file=sys.stderr, flush=True)
        if not decision.restarts_run:
            return decision.exit_code
        number, restarted = number + 1, decision.message if decision.resumes else None


def _environments(
    assignment: Assignment, ranks: LocalRanks, number: int, restarted: str | None
) -> list[dict[str, str]]:
    """Environments of this node's ranks: rank, store address, and why the run was restarted, if it was."""
    address = env.StoreAddress(assignment.node.host, assignment.node.port, hosted_by_agent=True, attempt=number)
    common = env.store_variables(address)
    processes = [env.ProcessRank(ranks.first + local, local, ranks.all, ranks.here) for local in range(ranks.here)]
    return [
        env.child_environment(PANTHERAML_RESTARTED=restarted, **common, **env.rank_variables(process))
        for process in processes
    ]


def main() -> int:
    log.start(debug=env.debug_requested())
    try:
        assignment = Assignment.from_json(sys.argv[1])
        with shared_token(Path(assignment.run), remove=assignment.node.number == 0):
            return run_node(assignment, sys.argv[2:])
    except PantheraError as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr, flush=True)
        return err.exit_code
    except KeyboardInterrupt:  # while waiting for the other nodes
        print("Interrupted.", file=sys.stderr)
        return InterruptedRunError.exit_code
