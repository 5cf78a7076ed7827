"""`python -m pantheraml.worker.machine ASSIGNMENT COMMAND...`: the ranks of one machine of several, again and again.

All machines meet first, so that one that does not come is named in time. When a rank dies on any of them, all end
theirs, meet again, and run the same command; it continues from the last checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pantheraml.base import env, log
from pantheraml.base.errors import InterruptedRunError, PantheraError
from pantheraml.launch.local import StopRequests
from pantheraml.launch.machines import Assignment
from pantheraml.launch.outcomes import STOPS, Starts
from pantheraml.launch.rank_processes import Watch, run_ranks
from pantheraml.launch.run_token import shared_token
from pantheraml.parallel.machines import Meeting, RanksHere
from pantheraml.specs.run_dir import RunDir


def run_machine(assignment: Assignment, command: list[str]) -> int:
    """To the end of the run; the exit code, which is the same on all machines but those that somebody stopped."""
    starts = Starts(RunDir(Path(assignment.run)), restart_on=assignment.restart_on, max_retries=assignment.max_retries)
    number, restarted, meeting = 0, None, None
    while True:
        # The store is hosted by the first meeting: each is held until the next one has begun.
        meeting = Meeting(assignment)
        number, restarted = meeting.agree_on_start(number, restarted)
        with StopRequests().installed() as stops:
            watch = Watch(stops, assignment.grace_seconds, meeting.others_failed, meeting.tell)
            environments = _environments(assignment, meeting.ranks, number, restarted)
            run_ranks(command, environments, meeting.ranks.first, watch)
            # the others need machine 0 to part in order
            hurry = (lambda: stops.urgent) if assignment.machine.number == 0 else (lambda: stops.count > 0)
            verdict = meeting.verdict(starts.judge, hurry)
        if stops.first is not None:
            return STOPS[stops.first]
        assert verdict is not None, "only who was asked to stop is in a hurry"
        if verdict.told and not (verdict.resumes and assignment.machine.number == 0):  # there the run itself says it
            print(verdict.told, file=sys.stderr, flush=True)
        if not verdict.starts_again:
            return verdict.exit_code
        number, restarted = number + 1, verdict.told if verdict.resumes else None


def _environments(assignment: Assignment, ranks: RanksHere, number: int, restarted: str | None) -> list[dict[str, str]]:
    """Of each rank here: who it is, where it meets the others, and whether it continues what an earlier one began."""
    address = env.StoreAddress(assignment.machine.host, assignment.machine.port, hosted_by_agent=True, attempt=number)
    common = env.store_variables(address)
    places = [env.ProcessRank(ranks.first + here, here, ranks.all, ranks.here) for here in range(ranks.here)]
    return [
        env.child_environment(PANTHERAML_RESTARTED=restarted, **common, **env.rank_variables(place)) for place in places
    ]


def main() -> int:
    log.start(debug=env.debug_requested())
    try:
        assignment = Assignment.from_json(sys.argv[1])
        with shared_token(Path(assignment.run), remove=assignment.machine.number == 0):
            return run_machine(assignment, sys.argv[2:])
    except PantheraError as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr, flush=True)
        return err.exit_code
    except KeyboardInterrupt:  # while it waited for the other machines
        print("Interrupted.", file=sys.stderr)
        return InterruptedRunError.exit_code


if __name__ == "__main__":
    sys.exit(main())
