"""`pantheraml profile`: run a few steps of a training run under torch's profiler, and show where their time goes."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pantheraml.base.text import printable
from pantheraml.specs.plan import Plan
from pantheraml.specs.tasks import ProfileResult, ProfileRow
from pantheraml.specs.train import TrainConfig

STEPS, WARMUP = 5, 3


def add(commands: Any) -> argparse.ArgumentParser:
    from pantheraml.cli.train import add_config_options

    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="show where the time of a training step goes",
        description="Run a few steps of a training run, planned as `train` plans it, under torch's profiler. Shows the"
        " phases of a step, the work of the device by kind, and the slowest operators. Nothing is saved.",
    )
    add_config_options(parser)
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps to profile (default: {STEPS})")
    parser.add_argument(
        "--warmup", type=int, default=WARMUP, metavar="N", help=f"steps before them (default: {WARMUP})"
    )
    parser.add_argument("--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.errors import ConfigError, StorageError
    from pantheraml.cli.inputs import check_inputs
    from pantheraml.cli.train import config_from
    from pantheraml.runs.plan_here import plan_here

    if arguments.steps < 1 or arguments.warmup < 0:
        raise ConfigError(
            "--steps must be at least 1, and --warmup at least 0.", fix="See `pantheraml profile --help`."
        )
    trace = None if arguments.trace is None else Path(arguments.trace).absolute()
    if trace is not None and not trace.parent.is_dir():
        raise StorageError(f"There is no folder {trace.parent}.", fix="Choose another --trace.")
    config = config_from(arguments)
    check_inputs(config)
    plan = plan_here(config, place=None)
    result = _profile(config, plan, arguments, trace)
    if arguments.json:
        print(result.model_dump_json(indent=1))
    else:
        show(result, trace)
    return 0


def _profile(config: TrainConfig, plan: Plan, arguments: argparse.Namespace, trace: Path | None) -> ProfileResult:
    from pantheraml.base.folders import storage_errors, working_folder
    from pantheraml.cli.screen import progress
    from pantheraml.runs.tasks import run_prepare, run_request
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import ProfileRequest

    def answer(folder: Path) -> ProfileResult:
        if trace is not None:
            with storage_errors(trace):
                shutil.move(folder / "trace.json", trace)
        return ProfileResult.model_validate_json((folder / "profile.json").read_text())

    with working_folder("profile") as folder:
        run = RunDir(folder / "run")
        run.mark()
        run.write_config(config)
        run.write_plan(plan)
        readers = progress("profile", quiet=arguments.json)
        run_prepare(run, config, readers=readers)
        request = ProfileRequest(
            run_dir=run.path, steps=arguments.steps, warmup=arguments.warmup, trace=trace is not None
        )
        readers = progress("profile", quiet=arguments.json)
        result: ProfileResult = run_request("profile", request, plan=plan, readers=readers, answer=answer)
    return result


def show(result: ProfileResult, trace: Path | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    ranks = "" if result.world_size == 1 else f", rank 0 of {result.world_size}"
    memory = f"at most {result.memory_bytes / 2**30:.2f} GiB"
    console.print(
        f"{_time(result.step_seconds)} per step, {result.tokens_per_second:,.0f} tokens/s: {result.steps} step(s) after"
        f" {result.warmup}, on {result.device} in {result.precision}{ranks}; {memory}",
        soft_wrap=True,
    )
    _table(console, "phase", result.phases)
    _table(console, "work", result.parts)
    _table(console, "slowest kernels" if result.device == "cuda" else "slowest operators", result.operators)
    if trace is not None:
        console.print(Text(printable(f"Trace: {trace}")))


def _table(console: Any, title: str, rows: Sequence[ProfileRow]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column(title, overflow="ellipsis", no_wrap=True, max_width=50)
    for name in ("per step", "share", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(printable(row.name)), _time(row.seconds), f"{row.share:.1%}", f"{row.calls:,.0f}")
    console.print()
    console.print(table)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
