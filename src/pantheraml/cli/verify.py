"""`pantheraml verify`: check on this host that N processes give the same result as one, in every parallel mode."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pantheraml.base.text import printable
from pantheraml.specs.plan import Plan
from pantheraml.specs.tasks import ModeVerdict, Verdicts
from pantheraml.specs.train import TrainConfig

STEPS = 5
EXAMPLES = 200


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="check that N processes give the result of one",
        description="Run the first steps of a training run in one process and, on the same global batches, in every"
        " parallel mode; compare losses, gradients and weights. Without --config it uses a small built-in model.",
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="number of processes (default: one per GPU, at least 2)")
    parser.add_argument("--modes", metavar="A,B", help="modes, such as ddp,fsdp,tp (default: all that N allows)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device (default: cuda if there is a GPU)")
    parser.add_argument("--config", metavar="FILE", help="config file with model, data and settings to use")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps to compare (default: {STEPS})")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.base.errors import ConfigError, EqualityError
    from pantheraml.base.folders import working_folder

    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps} compares nothing.", fix="Compare at least one step.")
    with working_folder("verify") as folder:
        config = _config(arguments, folder)
        plan = _plan(config, arguments)
        verdicts = _verify(config, plan, arguments, folder)
    if arguments.json:
        print(verdicts.model_dump_json(indent=1))
    else:
        show(verdicts)
    if not verdicts.passed:
        failed = [verdict.mode for verdict in verdicts.modes if verdict.passed is False]
        raise EqualityError(
            f"{', '.join(failed)}: the result differs from one process's by more than rounding.",
            fix="Do not train in that mode on this host; please report it with the output of `verify --json`.",
        )
    return 0


def _config(arguments: argparse.Namespace, folder: Path) -> TrainConfig:
    from pantheraml.specs.config_file import Key, load_config
    from pantheraml.specs.consent import check_config_file

    if arguments.config is None:
        return _built_in(folder, arguments.device)
    overrides: dict[Key, Any] = {}
    if arguments.device is not None:
        overrides["device",] = arguments.device
    config = load_config(Path(arguments.config), overrides)
    check_config_file(Path(arguments.config), config.model, overrides)
    return config


def _built_in(folder: Path, device: str | None) -> TrainConfig:
    """Create a Llama of eight layers and its data: enough for every mode with up to eight processes."""
    from pantheraml.data import synthetic
    from pantheraml.specs.config_file import validate

    (folder / "model").mkdir()
    examples = synthetic.base_examples(EXAMPLES, seed=0)
    synthetic.write_examples(folder / "data.jsonl", examples)
    size = synthetic.write_tokenizer(folder / "model", examples, vocab_size=512)
    synthetic.write_model_config(folder / "model", vocab_size=size, hidden_size=128, layers=8, heads=8, longest=128)
    return validate(
        {
            "model": {"path": str(folder / "model"), "init": "random", "precision": "fp32"},
            "data": {"path": str(folder / "data.jsonl"), "seq_len": 128, "cache_dir": str(folder / "cache")},
            "method": {"kind": "full"},
            "train": {"global_batch_size": 13, "learning_rate": 1e-3, "max_steps": 100, "warmup_steps": 2},
            "device": device or "auto",
        }
    )


def _plan(config: TrainConfig, arguments: argparse.Namespace) -> Plan:
    """Plan as for one process, with the requested number; if there are too few GPUs, ranks share them and use gloo."""
    from pantheraml.base.errors import ConfigError
    from pantheraml.devices.probe import probe
    from pantheraml.planner.choose import choose
    from pantheraml.specs.parallel import ParallelDims

    devices = probe()
    model = config.model.model_copy(update={"device_map": None, "max_memory": None})
    single = config.model_copy(update={"parallel": _one_process(config), "model": model})
    plan = choose(single, devices)
    count = arguments.nproc or max(2, len(devices.gpus) if plan.device == "cuda" else 0)
    if count < 2:
        raise ConfigError("A comparison with one process needs at least two.", fix="Use --nproc 2 or more.")
    if count > config.train.global_batch_size:
        raise ConfigError(
            f"{count} processes cannot share a global batch of {config.train.global_batch_size} sequence(s).",
            fix="Lower --nproc, or raise train.global_batch_size.",
        )
    gpus = [gpu.index for gpu in devices.gpus][:count] if plan.device == "cuda" else []
    enough = len(gpus) == count and config.parallel.backend == "nccl"
    return plan.model_copy(
        update={
            "world_size": count,
            "dims": ParallelDims(replicate=count),
            "device_ids": tuple(gpus),
            "backend": "nccl" if enough else "gloo",
            # uneven, with several micro-batches: the harder case
            "micro_batch_size": max(1, config.train.global_batch_size // count // 3),
            "threads_per_process": max(1, devices.cpu_count // count),
            "choices": (),
        }
    )


def _one_process(config: TrainConfig) -> Any:
    from pantheraml.specs.multi_gpu import MultiGPUConfig

    return MultiGPUConfig(mode="none", device_ids=config.parallel.device_ids)  # type: ignore[arg-type]


def _verify(config: TrainConfig, plan: Plan, arguments: argparse.Namespace, folder: Path) -> Verdicts:
    from pantheraml.cli.screen import progress
    from pantheraml.runs.tasks import run_prepare, run_request
    from pantheraml.specs.run_dir import RunDir
    from pantheraml.specs.tasks import VerifyRequest

    modes = _modes(arguments, plan.world_size)  # first: a wrong one is no reason to prepare data
    run = RunDir(folder / "run")
    run.mark()
    run.write_config(config)
    run.write_plan(plan)
    run_prepare(run, config, readers=progress("verify", quiet=arguments.json))
    request = VerifyRequest(
        run_dir=run.path,
        modes=modes,
        steps=arguments.steps,
        explicit=arguments.modes is not None,
    )
    verdicts: Verdicts = run_request(
        "verify",
        request,
        plan=plan,
        readers=progress("verify", quiet=arguments.json),
        answer=lambda answers: Verdicts.model_validate_json((answers / "verdicts.json").read_text()),
    )
    return verdicts


def _modes(arguments: argparse.Namespace, count: int) -> Any:
    from pantheraml.base.errors import ConfigError
    from pantheraml.planner.dims import named_modes

    known = named_modes(count)
    if arguments.modes is None:
        return known
    names = arguments.modes.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"Unknown mode {unknown[0]!r} for {count} processes.", fix=f"Choose from {', '.join(known)}.")
    return {name: known[name] for name in names}


def show(verdicts: Verdicts) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("mode", "degrees", "loss", "gradient", f"weights after {verdicts.steps} steps", "time", ""):
        table.add_column(name, justify="left" if name in ("mode", "degrees", "") else "right")
    for verdict in verdicts.modes:
        table.add_row(*(Text(printable(cell)) for cell in _cells(verdict, verdicts)))
    console.print("Relative difference to one process on the same global batches:")
    console.print(table)
    console.print(
        f"Tolerance: {verdicts.tolerance:.1e} for loss and gradient, {verdicts.weights_tolerance:.1e} for weights"
        f" ({verdicts.tolerance_reason}). Time: per step, relative to one process."
    )
    for note in verdicts.notes:
        console.print(Text(printable(f"Note: {note}.")))


def _cells(verdict: ModeVerdict, verdicts: Verdicts) -> list[str]:
    degrees = str(verdict.dims)
    if verdict.batch_shares is not None:
        degrees += f", shares {','.join(map(str, verdict.batch_shares))}"
    if verdict.not_possible is not None:
        return [verdict.mode, degrees, "-", "-", "-", "-", f"not possible: {verdict.not_possible}"]
    numbers = (verdict.loss, verdict.gradient, verdict.weights)
    differences = [f"{number:.1e}" for number in numbers if number is not None]
    ratio = f"{verdict.seconds / verdicts.seconds_of_one:.2f}x" if verdict.seconds is not None else "-"
    return [verdict.mode, degrees, *differences, ratio, "equal" if verdict.passed else "DIFFERS"]
