"""`pantheraml train`: from a config file or flags to trained weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base import env
from pantheraml.base.errors import ConfigError

if TYPE_CHECKING:
    from pantheraml.specs.config_file import Key
    from pantheraml.specs.train import TrainConfig

FLAGS = {
    "model": ("model", "path"),
    "data": ("data", "path"),
    "eval_data": ("data", "eval_path"),
    "method": ("method", "kind"),
    "device": ("device",),
    "on_bad_row": ("data", "on_bad_row"),
}


def add(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "train", help="fine-tune a model", description="Fine-tune a model from a config file, from flags, or both."
    )
    add_config_options(parser)
    parser.add_argument("--output", metavar="DIR", help="run folder (default: runs/<name of the config or model>)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        choices=["auto"],
        help="continue the run that the output folder holds; if it holds none, begin one",
    )
    add_allow_change(parser)
    add_machines(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the run that the output folder holds")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    return parser


def add_machines(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group(
        "several machines", "Run the same command on each; --nproc counts one machine's."
    )
    several.add_argument("--nnodes", type=int, metavar="N", help="number of machines")
    several.add_argument("--node-rank", type=int, metavar="I", help="which of them this is, from 0")
    several.add_argument(
        "--rdzv", metavar="HOST:PORT", help="where they meet: an address of machine 0, and a free port"
    )


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """What `train` and `plan` share: everything that makes a TrainConfig."""
    add_inputs(parser)
    parser.add_argument("--eval-data", metavar="FILE", help="evaluation data (data.eval_path)")
    parser.add_argument("--method", choices=["lora", "dora", "qlora", "full"], help="what to train (method.kind)")
    parser.add_argument("--nproc", metavar="auto|N", help="number of processes (parallel.world_size)")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """A model, text, and where to compute."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; flags below override it")
    parser.add_argument("--model", metavar="DIR", help="model folder or hub name (model.path)")
    parser.add_argument("--data", metavar="FILE", help="training data (data.path)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="where to compute (device)")
    parser.add_argument(
        "--on-bad-row", choices=["stop", "skip"], help="what to do with unusable rows (data.on_bad_row)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="set any other key; may be repeated"
    )


def add_allow_change(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="FIELD",
        help="resume although this key or section changed and the run cannot go on exactly; may be repeated",
    )


def config_from(arguments: argparse.Namespace) -> TrainConfig:
    from pantheraml.specs.config_file import load_config
    from pantheraml.specs.consent import check_config_file

    given = vars(arguments)
    overrides: dict[Key, Any] = {key: given[flag] for flag, key in FLAGS.items() if given.get(flag) is not None}
    overrides |= _common_overrides(arguments)
    if arguments.config is None and not {("model", "path"), ("data", "path")} <= overrides.keys():
        raise ConfigError(
            f"Nothing to {arguments.command}: give a config file, or --model and --data.",
            todo=f"For example: pantheraml {arguments.command} --model DIR --data FILE --output DIR",
        )
    path = Path(arguments.config) if arguments.config else None
    config = load_config(path, overrides)
    if path is not None:
        check_config_file(path, config.model, overrides)
    return config


def resume_overrides(arguments: argparse.Namespace) -> dict[Key, Any]:
    """What `resume` lays over the configuration of the run; leave to change something holds for one start."""
    overrides: dict[Key, Any] = {("checkpoint", "allow_change"): arguments.allow_change}
    if _one_of_several_machines(arguments) or env.launched_rank() is not None:
        overrides["parallel", "world_size"] = None  # as many as are started now, by the machines or another launcher
    return overrides | _common_overrides(arguments)


def _common_overrides(arguments: argparse.Namespace) -> dict[Key, Any]:
    from pantheraml.specs.config_file import parse_overrides

    overrides: dict[Key, Any] = {}
    if vars(arguments).get("nproc") is not None and not _one_of_several_machines(arguments):
        overrides["parallel", "world_size"] = _processes(arguments.nproc)
    return overrides | parse_overrides(arguments.set)


def _one_of_several_machines(arguments: argparse.Namespace) -> bool:
    return vars(arguments).get("nnodes") is not None


def start_this_machine(arguments: argparse.Namespace, config: TrainConfig, output: Path) -> None:
    """If it is one of several: returns in its ranks alone, which do as ranks do. If not: does nothing."""
    from pantheraml.devices.probe import probe
    from pantheraml.launch.machines import Machine, become_agent, processes_here

    if not _one_of_several_machines(arguments):
        if arguments.node_rank is not None or arguments.rdzv is not None:
            raise ConfigError("--node-rank and --rdzv are for several machines.", todo="Give --nnodes too.")
        return
    machine = Machine.from_options(arguments.nnodes, arguments.node_rank, arguments.rdzv)
    if env.launched_rank() is None:
        asked = None if arguments.nproc is None else _processes(arguments.nproc)
        become_agent(machine, processes_here(config, probe(), asked), config, output)
    if not env.was_relaunched():
        raise ConfigError(
            "--nnodes starts processes on this machine, but another launcher has started this one.",
            todo="Leave --nnodes out, or the launcher.",
        )


def _processes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"--nproc takes auto or a number from 1, not {text!r}.", todo="For example: --nproc 2, or --nproc auto."
        )
    return int(text)


def default_output(arguments: argparse.Namespace, config: TrainConfig) -> Path:
    name = Path(arguments.config).stem if arguments.config else Path(config.model.path).name
    return Path("runs") / (name or "run")


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.execute import Screen, run_training

    if arguments.resume and arguments.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other.", todo="Keep one of them.")
    config = config_from(arguments)
    if arguments.allow_change:
        allowed = config.checkpoint.model_copy(update={"allow_change": arguments.allow_change})
        config = config.model_copy(update={"checkpoint": allowed})
    output = Path(arguments.output) if arguments.output else default_output(arguments, config)
    start_this_machine(arguments, config, output)
    begun = env.restarted_because() is not None
    summary = run_training(
        config,
        output,
        resume=arguments.resume is not None or begun,
        overwrite=arguments.overwrite and not begun,
        screen=Screen(title=f"train {output}", quiet=arguments.json),
    )
    show_result(summary, output, as_json=arguments.json)
    return 0


def show_result(summary: dict[str, Any], output: Path, *, as_json: bool) -> None:
    from pantheraml.specs.run_dir import RunDir

    if as_json:
        print(json.dumps(summary, indent=1))
        return
    print(f"Trained weights: {output / summary['output']['path']}")
    if RunDir(output).report.exists():
        print(f"Report:          {RunDir(output).report}")
    print(f'Try it:          pantheraml generate {output} --prompt "..."')
