"""`python -m pantheraml.worker.agent N STORE COMMAND...`: N ranks of a command, ended together, judged by the first to
fail. STORE says where they meet (`launch.script.Store`).

The exit code is 0, that of the rank that failed first, or, of the signal that stopped this process, 143 where it was a
scheduler's notice and 128 + its number otherwise.
"""

from __future__ import annotations

import sys

from pantheraml.launch.outcomes import STOPS
from pantheraml.launch.script import Store
from pantheraml.parallel.agent import Ended, run_command


def main() -> int:
    processes, where, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    store: Store = "file" if where == "file" else "loopback"
    return exit_code_of(run_command(command, processes=processes, store=store))


def exit_code_of(ended: Ended) -> int:
    """Says who failed, if someone did."""
    if ended.stopped_by is not None:
        return STOPS.get(ended.stopped_by, 128 + ended.stopped_by)
    if ended.failure is not None:
        print(ended.failure, file=sys.stderr, flush=True)
        return ended.failure.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
