"""Rank script of test_examples: run one script of examples/ as its users do, in a folder of its own.

`example_ranks FOLDER SCRIPT [ARGUMENT ...]`: what rank r prints goes to FOLDER/out-r.txt.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

import accelerate  # noqa: F401  # imported before the ranks are forked
import datasets  # noqa: F401
import peft  # noqa: F401
import trl  # noqa: F401

import pantheraml.performance
import pantheraml.stability
import pantheraml.trainer  # noqa: F401
from pantheraml.base.env import process_rank

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    folder, script, *arguments = sys.argv[1:]
    os.chdir(folder)
    sys.argv = [script, *arguments]
    with open(f"out-{process_rank().rank}.txt", "w") as out, contextlib.redirect_stdout(out):
        runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
