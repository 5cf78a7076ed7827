"""`python -m pantheraml.worker.machine COUNT NUMBER HOST PORT PROCESSES TIMEOUT RETRIES COMMAND...`

The ranks of one machine of several. All machines meet first, so that one that does not come is named in time.
"""

from __future__ import annotations

import sys

from pantheraml.base import env, log
from pantheraml.base.errors import PantheraError
from pantheraml.parallel.agent import Machines, run_command
from pantheraml.worker.agent import exit_code_of


def main() -> int:
    count, number, host, port, processes, timeout, retries = sys.argv[1:8]
    log.start(debug=env.debug_requested())
    machines = Machines(int(count), int(number), host, int(port), int(timeout), int(retries))
    try:
        ended = run_command(sys.argv[8:], processes=int(processes), machines=machines)
    except PantheraError as err:
        print(f"{type(err).__name__}: {err}", file=sys.stderr, flush=True)
        return err.exit_code
    return exit_code_of(ended)


if __name__ == "__main__":
    sys.exit(main())
