"""`pantheraml gpus`: the GPUs of this host, their load, health and processes, once or live.

On a terminal it is a table with bars; `--watch` keeps it up to date, with the load of the last minute. In a pipe, it is
the same table without colors. Unknown values are dashes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from typing import Any

from pantheraml.base.errors import ConfigError

REFRESH_SECONDS = 1.0
INVENTORY_SECONDS = 5.0
"""Seconds between readings of processes and health, which take more calls than a sample."""


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "gpus",
        help="show the GPUs, their load and health",
        description="Show the GPUs of this host: memory, load, temperature, power, health with reasons, and who uses"
        " them. Also its CPU cores and memory.",
    )
    parser.add_argument("--watch", action="store_true", help="update every second until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print as JSON; with --watch one line per second")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        with contextlib.suppress(KeyboardInterrupt):
            _print_json(forever=arguments.watch)
        return 0
    if arguments.watch and not sys.stdout.isatty():
        raise ConfigError("--watch draws on a terminal, but the output is not one.", fix="Add --json, or drop --watch.")
    from rich.console import Console

    from pantheraml.cli.gpu_table import GPUTable
    from pantheraml.devices.inventory import take_inventory

    console = Console()
    if arguments.watch:
        return _watch(console)
    console.print(GPUTable(take_inventory(), samples=(_sample(),)))
    return 0


def _sample() -> Any:
    """Read GPUs and host once. Utilization is the driver's, over its last sampling period."""
    from pantheraml.devices.background import take_once

    return take_once()


def _print_json(*, forever: bool) -> None:
    from dataclasses import asdict

    from pantheraml.devices.inventory import take_inventory

    while True:
        sample = _sample()
        values = take_inventory().model_dump(mode="json")
        for gpu, snapshot in zip(values["gpus"], sample.gpus, strict=False):
            gpu["now"] = asdict(snapshot)
        print(json.dumps(values, indent=None if forever else 1), flush=True)
        if not forever:
            return
        time.sleep(REFRESH_SECONDS)


def _watch(console: Any) -> int:
    from rich.live import Live

    from pantheraml.cli.gpu_table import HISTORY, GPUTable
    from pantheraml.devices.background import BackgroundSampler
    from pantheraml.devices.inventory import take_inventory

    # an interactive view may spend more on samples than telemetry beside a run
    sampler = BackgroundSampler(period=REFRESH_SECONDS, cpu_share=1.0, health_seconds=REFRESH_SECONDS)
    inventory, due = take_inventory(), time.monotonic() + INVENTORY_SECONDS
    ended = contextlib.suppress(KeyboardInterrupt)
    with ended, sampler, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if time.monotonic() >= due:
                inventory, due = take_inventory(), time.monotonic() + INVENTORY_SECONDS
            samples = sampler.samples()[-HISTORY:]
            live.update(GPUTable(inventory, samples=samples, health=sampler.health(), watching=True), refresh=True)
            time.sleep(REFRESH_SECONDS)
    return 0
