"""`pantheraml gpus`: list the hardware that PantheraML detects."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "gpus", help="list the GPUs", description="List the GPUs, CPU cores and memory of this host."
    )
    parser.add_argument("--json", action="store_true", help="print as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.devices.probe import probe
    from pantheraml.readers.number_format import size

    spec = probe()
    if arguments.json:
        print(json.dumps(spec.model_dump(mode="json"), indent=1))
        return 0
    for gpu in spec.gpus:
        capability = "?" if gpu.compute_capability is None else ".".join(map(str, gpu.compute_capability))
        memory = f"{size(gpu.free_bytes)} of {size(gpu.total_bytes)} free"
        print(f"GPU {gpu.index}: {gpu.name}, {memory}, compute capability {capability}")
    if not spec.gpus:
        print(f"No GPU: {spec.note}")
    print(f"CPU: {spec.cpu_count} cores, {size(spec.ram_bytes)} RAM")
    return 0
