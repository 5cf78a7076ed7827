"""`python -m pantheraml.worker.entry elastic N COMMAND...`: run a script as N ranks that end together.

The exit code is 0, that of the first rank to fail, or,
if a signal stopped this process, 143 for a preemption signal and 128 + its number otherwise.
"""

from __future__ import annotations

import sys

from pantheraml.launch.outcomes import STOPS
from pantheraml.rendezvous.elastic_agent import LaunchResult, run_command


def main() -> int:
    return exit_code_of(run_command(sys.argv[2:], processes=int(sys.argv[1])))


def exit_code_of(ended: LaunchResult) -> int:
    """Return the exit code; print which rank failed, if one did."""
    if ended.stopped_by is not None:
        return STOPS.get(ended.stopped_by, 128 + ended.stopped_by)
    if ended.failure is not None:
        print(ended.failure, file=sys.stderr, flush=True)
        return ended.failure.exit_code
    return 0
