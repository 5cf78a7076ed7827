"""`pantheraml bench`: runs a suite of benchmarks, ours and other systems side by side, or calibrates this machine.

Suites, their results and the pages made from them belong to the source tree (`benchmarks/`), not to the installed
package: they measure other people's programs beside ours. So this needs a checkout, and only starts what is there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from pantheraml.base.errors import ConfigError

SCRIPT = Path("benchmarks") / "suite.py"


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="compare speed and memory with other systems",
        description="Run a suite of benchmarks and write its results, the tables in docs/ included; this needs a"
        " checkout. Or, with --calibrate, measure the rates from which `pantheraml plan` predicts times.",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--suite", metavar="NAME", help="which suite: h200, h200-families, h200-planner, smoke")
    which.add_argument(
        "--calibrate", action="store_true", help="measure and store this machine's rates, in about ten seconds"
    )
    parser.add_argument("--list", action="store_true", help="list the suite's cases and run nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only cases of this name (`ours-8b-*`); repeatable",
    )
    parser.add_argument("--resume", action="store_true", help="continue the newest result file with what it lacks")
    parser.add_argument("--again", action="store_true", help="with --resume: also measure what it has already")
    parser.add_argument("--minutes", type=float, metavar="N", help="skip cases that would not end within N minutes")
    parser.add_argument("--results", metavar="DIR", help="where results go (default: benchmarks/results)")
    parser.add_argument("--work", metavar="DIR", help="where models and runs go (default: runs/bench)")
    parser.add_argument(
        "--device", choices=["cpu"], help="run our cases on the CPU (default: the GPU, if there is one)"
    )
    parser.add_argument(
        "--peers", metavar="DIR", help="folder with other systems' packages, kept away from our own command line"
    )
    parser.add_argument(
        "--extras", metavar="DIR", help="folder with our extras' packages, kept away from other systems"
    )
    parser.add_argument("--commit", metavar="HASH", help="commit to record if git is not available")
    parser.add_argument("--json", action="store_true", help="print the result (or the list) as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.launch.local import die_with_parent

    if arguments.calibrate:
        return _calibrate(arguments)
    script = find_script()
    command = [sys.executable, str(script), "--suite", arguments.suite]
    command += [word for pattern in arguments.only for word in ("--only", pattern)]
    for name in ("list", "resume", "again", "json"):
        command += [f"--{name}"] if getattr(arguments, name) else []
    for name in ("minutes", "results", "work", "device", "peers", "extras", "commit"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name}", str(value)]
    return subprocess.run(command, check=False, preexec_fn=die_with_parent).returncode


def _calibrate(arguments: argparse.Namespace) -> int:
    from pantheraml.runs.calibration import calibrate

    for rates, path in calibrate(cpu=arguments.device == "cpu"):
        if arguments.json:
            print(rates.model_dump_json(indent=1))
            continue
        for name, value in rates.model_dump(exclude={"device", "source", "matmul_tflops"}).items():
            if value is not None:
                print(f"{name:18} {value:10.4g}")
        for name, value in rates.matmul_tflops.items():
            print(f"{'matmul ' + name:18} {value:10.4g} TFLOP/s")
        print(f"Stored for {rates.device}: {path}")
    return 0


def find_script() -> Path:
    """Script in the checkout that this package is part of; one in the current folder may be anyone's."""
    checkout = Path(__file__).parents[3]
    if (checkout / SCRIPT).is_file():
        return checkout / SCRIPT
    raise ConfigError(
        "The suites are not part of the installed package.",
        where=str(checkout),
        fix="Install from a checkout of the source (`pip install -e .` there): it has them in benchmarks/suites.",
    )
