"""`rank_main` for runs with fault injection."""

from __future__ import annotations

from pantheraml.base import env
from tests.distributed import rank_main


def main() -> None:
    env.set_for_this_process("PANTHERAML_FAULTS", "1")
    rank_main.main()


if __name__ == "__main__":
    main()
