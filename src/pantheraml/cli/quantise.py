"""`pantheraml quantise`: a model in 4 bits, rounded so that training on the given text sees little of it."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError

if TYPE_CHECKING:
    from pantheraml.specs.tasks import Quantised
    from pantheraml.specs.train import TrainConfig

TOKENS = 65_536


def add(commands: Any) -> argparse.ArgumentParser:
    from pantheraml.cli.train import add_inputs

    parser: argparse.ArgumentParser = commands.add_parser(
        "quantise",
        help="write a model in 4 bits, rounded by text",
        description="Write a model with its linear layers in nf4 (bitsandbytes' format), each weight rounded so that"
        " outputs and gradients on the given text change least. Train it with --method qlora.",
    )
    add_inputs(parser)
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to write (must not hold anything)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"how much of the text to use (default: {TOKENS:,})"
    )
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.folders import require_empty
    from pantheraml.cli.train import config_from
    from pantheraml.readers import figures

    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens} is no text.", todo=f"Leave it out for {TOKENS:,}.")
    require_empty(Path(arguments.output))
    done = _quantise(_settings(config_from(arguments)), arguments)
    if arguments.json:
        print(done.model_dump_json(indent=1))
        return 0
    print(
        f"Wrote {arguments.output} after {figures.duration(done.seconds)}: {done.layers} linear layers in nf4, with"
        f" {done.share:.0%} of the weights; {figures.size(done.bytes)} in all."
    )
    if done.left is not None:
        print(
            f"On {done.tokens:,} tokens of the text, their products change by {done.left:.0%} (in squares) of what"
            " rounding to the nearest values would change."
        )
    inputs = [arguments.config] if arguments.config else ["--data", arguments.data]
    print(
        "Train it:  " + shlex.join(["pantheraml", "train", *inputs, "--model", arguments.output, "--method", "qlora"])
    )
    return 0


def _settings(config: TrainConfig) -> TrainConfig:
    """What of a run's settings matters here: its model, its text (packed, for padding says nothing) and its device."""
    from pantheraml.specs.multi_gpu import MultiGPUConfig
    from pantheraml.specs.resume import with_absolute_paths
    from pantheraml.specs.train import TrainConfig, TrainSettings

    if config.model.init == "random":
        raise ConfigError("model.init=random has no weights to round.", todo="Give a trained model.")
    return with_absolute_paths(
        TrainConfig(
            model=config.model.model_copy(update={"precision": "auto", "device_map": None, "max_memory": None}),
            data=config.data.model_copy(update={"packing": True, "eval_path": None}),
            train=TrainSettings(seed=config.train.seed),
            parallel=MultiGPUConfig(world_size=1, device_ids=config.parallel.device_ids),
            device=config.device,
        )
    )


def _quantise(config: TrainConfig, arguments: argparse.Namespace) -> Quantised:
    from pantheraml.base.folders import no_scratch_left
    from pantheraml.cli.execute import Screen, run_prepare, run_request
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import Quantised, QuantiseRequest

    plan = choose(config, probe())
    screen = Screen(title=f"quantise {config.model.path}", quiet=arguments.json)
    with tempfile.TemporaryDirectory(prefix="pantheraml-quantise-") as folder:
        run = RunDir(Path(folder) / "run")
        run.mark()
        run.write_config(config)
        run.write_plan(plan)
        run_prepare(run, config, screen)
        request = QuantiseRequest(run_dir=run.path, output=Path(arguments.output).absolute(), tokens=arguments.tokens)
        with no_scratch_left(request.output):
            done: Quantised = run_request(
                "quantise",
                request,
                plan=plan,
                screen=replace(screen, title=""),
                answer=lambda answers: Quantised.model_validate_json((answers / "quantised.json").read_text()),
            )
    return done
