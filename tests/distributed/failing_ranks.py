"""Rank script of test_launching: ranks that fail or hang."""

from __future__ import annotations

import sys
import time

from pantheraml.base.env import process_rank


def main() -> None:
    if process_rank().rank == 1:
        if sys.argv[1] == "raise":
            raise RuntimeError("rank 1 is unwell")
        if sys.argv[1] == "exit":
            sys.exit(7)
    if sys.argv[1] != "end":
        time.sleep(600)
