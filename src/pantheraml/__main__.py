"""`python -m pantheraml COMMAND`: the command line, for launchers that start modules (torchrun -m pantheraml train)."""

import sys

from pantheraml.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
