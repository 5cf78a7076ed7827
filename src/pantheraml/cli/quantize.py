"""`pantheraml quantize`: quantize a model to nf4, calibrated on the training text."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError

if TYPE_CHECKING:
    from pantheraml.specs.tasks import QuantizeResult
    from pantheraml.specs.train import TrainConfig

TOKENS = 65_536


def add(commands: Any) -> argparse.ArgumentParser:
    from pantheraml.cli.train import add_inputs

    parser: argparse.ArgumentParser = commands.add_parser(
        "quantize",
        help="quantize a model to 4 bits, calibrated on text",
        description="Write a model with its linear layers in nf4 (bitsandbytes format), rounded to minimize the error"
        " of outputs and gradients on the given text. Train it with --method qlora.",
    )
    add_inputs(parser)
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to write (must be empty)")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"number of calibration tokens (default: {TOKENS:,})"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.folders import require_empty
    from pantheraml.cli.train import config_from
    from pantheraml.readers import number_format as figures

    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens} must be at least 1.", fix=f"Omit it for {TOKENS:,}.")
    require_empty(Path(arguments.output))
    done = _quantize(_settings(config_from(arguments)), arguments)
    if arguments.json:
        print(done.model_dump_json(indent=1))
        return 0
    print(
        f"Wrote {arguments.output} in {figures.duration(done.seconds)}: {done.layers} linear layers in nf4, with"
        f" {done.share:.0%} of the weights; {figures.size(done.bytes)} total."
    )
    if done.left is not None:
        print(f"Squared output error on {done.tokens:,} tokens of the text: {done.left:.0%} of round-to-nearest.")
    inputs = [arguments.config] if arguments.config else ["--data", arguments.data]
    print(
        "Train it:  " + shlex.join(["pantheraml", "train", *inputs, "--model", arguments.output, "--method", "qlora"])
    )
    return 0


def _settings(config: TrainConfig) -> TrainConfig:
    """Keep the settings that matter here: model, text (packed, since padding carries no information) and device."""
    from pantheraml.specs.multi_gpu import MultiGPUConfig
    from pantheraml.specs.resume import with_absolute_paths
    from pantheraml.specs.train import TrainConfig, TrainSettings

    if config.model.init == "random":
        raise ConfigError("model.init=random has no weights to quantize.", fix="Use a trained model.")
    return with_absolute_paths(
        TrainConfig(
            model=config.model.model_copy(update={"precision": "auto", "device_map": None, "max_memory": None}),
            data=config.data.model_copy(update={"packing": True, "eval_path": None}),
            train=TrainSettings(seed=config.train.seed),
            parallel=MultiGPUConfig(world_size=1, device_ids=config.parallel.device_ids),
            device=config.device,
        )
    )


def _quantize(config: TrainConfig, arguments: argparse.Namespace) -> QuantizeResult:
    from pantheraml.base.folders import no_scratch_left
    from pantheraml.cli.screen import progress
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.runs.tasks import run_prepare, run_request
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import QuantizeRequest, QuantizeResult

    plan = choose(config, probe())
    with tempfile.TemporaryDirectory(prefix="pantheraml-quantize-") as folder:
        run = RunDir(Path(folder) / "run")
        run.mark()
        run.write_config(config)
        run.write_plan(plan)
        run_prepare(run, config, readers=progress(f"quantize {config.model.path}", quiet=arguments.json))
        request = QuantizeRequest(run_dir=run.path, output=Path(arguments.output).absolute(), tokens=arguments.tokens)
        with no_scratch_left(request.output):
            done: QuantizeResult = run_request(
                "quantize",
                request,
                plan=plan,
                readers=progress("", quiet=arguments.json),
                answer=lambda answers: QuantizeResult.model_validate_json((answers / "quantized.json").read_text()),
            )
    return done
