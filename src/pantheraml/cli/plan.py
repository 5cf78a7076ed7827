"""`pantheraml plan`: show what a run would do, and why, without starting it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pantheraml.base.text import printable


def add(commands: Any) -> argparse.ArgumentParser:
    from pantheraml.cli.train import add_config_options

    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show what a run would do, and why",
        description="Show every choice that a run would make, with its reason, without starting it.",
    )
    add_config_options(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.inputs import check_inputs
    from pantheraml.cli.train import config_from
    from pantheraml.devices.select import devices_for_run
    from pantheraml.planner.choose import choose
    from pantheraml.planner.no_effect import long_warmup

    config = config_from(arguments)
    check_inputs(config)
    plan = choose(config, devices_for_run(config))
    steps = config.train.max_steps
    if steps is not None and (message := long_warmup(config.train, steps)) is not None:
        plan = plan.model_copy(update={"warnings": (*plan.warnings, message)})
    if arguments.json:
        print(json.dumps(plan.model_dump(mode="json"), indent=1))
        return 0
    width = max(len(choice.name) for choice in plan.choices)
    for choice in plan.choices:
        print(printable(f"{choice.name:{width}}  {choice.value!s:12}  {choice.reason}"))
    for message in plan.warnings:
        print(printable(f"Warning: {message}."))
    return 0
