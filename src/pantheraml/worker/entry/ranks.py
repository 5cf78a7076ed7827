"""`python -m pantheraml.worker.entry ranks N COMMAND...`: run a command as N ranks of this node that end together.

The exit code is 0, that of the rank that failed, or 143 or 130 after a signal (`launch.outcomes.STOPS`).
"""

from __future__ import annotations

import os
import sys

from pantheraml.launch.local_ranks import run_local_ranks

GRACE_SECONDS = 30.0
"""To save after a signal, if TORCH_ELASTIC_SHUTDOWN_TIMEOUT, torchrun's name for it, does not say otherwise."""


def main() -> int:
    processes, command = int(sys.argv[1]), sys.argv[2:]
    grace = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE_SECONDS))
    outcome = run_local_ranks(command, processes, grace_seconds=grace)
    if outcome.message:
        print(outcome.message, file=sys.stderr, flush=True)
    return outcome.exit_code or 0
