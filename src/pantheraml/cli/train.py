"""`pantheraml train`: fine-tune a model from a config file or flags."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base import env
from pantheraml.base.errors import ConfigError

if TYPE_CHECKING:
    from pantheraml.specs.config_file import Key
    from pantheraml.specs.plan import Plan
    from pantheraml.specs.train import TrainConfig

CONSENT = ("trust_remote_code", "allow_pickle")
"""Keys of `model` that a plan file cannot consent to."""
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
        help="continue the run in the output folder, or start one if there is none",
    )
    add_allow_change(parser)
    add_node_options(parser)
    parser.add_argument("--plan", metavar="FILE", help="replay the plan that `pantheraml plan --json` wrote to FILE")
    parser.add_argument("--overwrite", action="store_true", help="replace the run in the output folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    return parser


def add_node_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several nodes", "Run the same command on every node; --nproc counts processes per node."
    )
    group.add_argument("--nnodes", type=int, metavar="N", help="number of nodes")
    group.add_argument("--node-rank", type=int, metavar="I", help="index of this node, from 0")
    group.add_argument("--rdzv", metavar="HOST:PORT", help="rendezvous: an address of node 0, and a free port")


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train` and `plan` that build a TrainConfig."""
    add_inputs(parser)
    parser.add_argument("--eval-data", metavar="FILE", help="evaluation data (data.eval_path)")
    parser.add_argument("--method", choices=["lora", "dora", "qlora", "full"], help="what to train (method.kind)")
    parser.add_argument("--nproc", metavar="auto|N", help="number of processes (parallel.world_size)")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for model, data and device."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="YAML file; flags below override it")
    parser.add_argument("--model", metavar="DIR", help="model folder or hub name (model.path)")
    parser.add_argument("--data", metavar="FILE", help="training data (data.path)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="device to train on (device)")
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
        help="resume although this key or section changed, so that the run is not continued exactly; may be repeated",
    )


def config_from(arguments: argparse.Namespace) -> TrainConfig:
    from pantheraml.specs.config_file import load_config
    from pantheraml.specs.consent import check_config_file

    overrides = given_overrides(arguments)
    if arguments.config is None and not {("model", "path"), ("data", "path")} <= overrides.keys():
        output = " --output DIR" if hasattr(arguments, "output") else ""
        raise ConfigError(
            f"Nothing to {arguments.command}: pass a config file, or --model and --data.",
            fix=f"For example: pantheraml {arguments.command} --model DIR --data FILE{output}",
        )
    path = Path(arguments.config) if arguments.config else None
    config = load_config(path, overrides)
    if path is not None:
        check_config_file(path, config.model, overrides)
    return config


def given_overrides(arguments: argparse.Namespace) -> dict[Key, Any]:
    given = vars(arguments)
    overrides: dict[Key, Any] = {key: given[flag] for flag, key in FLAGS.items() if given.get(flag) is not None}
    return overrides | _common_overrides(arguments)


def resume_overrides(arguments: argparse.Namespace) -> dict[Key, Any]:
    """Return the overrides of `resume` over the run's configuration; `--allow-change` applies to this start only."""
    overrides: dict[Key, Any] = {("checkpoint", "allow_change"): arguments.allow_change}
    if _is_multi_node(arguments) or env.launched_rank() is not None:
        overrides["parallel", "world_size"] = None  # the number started now, by the nodes or another launcher
    return overrides | _common_overrides(arguments)


def _common_overrides(arguments: argparse.Namespace) -> dict[Key, Any]:
    from pantheraml.specs.config_file import parse_overrides

    overrides: dict[Key, Any] = {}
    if vars(arguments).get("nproc") is not None and not _is_multi_node(arguments):
        overrides["parallel", "world_size"] = _processes(arguments.nproc)
    return overrides | parse_overrides(arguments.set)


def _is_multi_node(arguments: argparse.Namespace) -> bool:
    return vars(arguments).get("nnodes") is not None


def launch_this_node(arguments: argparse.Namespace, config: TrainConfig, output: Path) -> None:
    """On one of several nodes: start its ranks, and return only in those. On a single node: do nothing."""
    from pantheraml.devices.probe import probe
    from pantheraml.launch.nodes import NodeSpec, become_agent, processes_here

    if not _is_multi_node(arguments):
        if arguments.node_rank is not None or arguments.rdzv is not None:
            raise ConfigError("--node-rank and --rdzv are for several nodes.", fix="Add --nnodes.")
        return
    node = NodeSpec.from_options(arguments.nnodes, arguments.node_rank, arguments.rdzv)
    if env.launched_rank() is None:
        nproc = None if arguments.nproc is None else _processes(arguments.nproc)
        become_agent(node, processes_here(config, probe(), nproc), config, output)
    if not env.was_relaunched():
        raise ConfigError(
            "--nnodes starts processes on this node, but another launcher has started this one.",
            fix="Remove --nnodes, or start without the launcher.",
        )


def _processes(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(
            f"--nproc must be auto or a positive number, not {text!r}.", fix="For example: --nproc 2, or --nproc auto."
        )
    return int(text)


def default_output(arguments: argparse.Namespace, config: TrainConfig) -> Path:
    name = Path(arguments.config).stem if arguments.config else Path(config.model.path).name
    return Path("runs") / (name or "run")


def run(arguments: argparse.Namespace) -> int:
    from pantheraml.cli.screen import progress
    from pantheraml.runs.session import run_training

    if arguments.resume and arguments.overwrite:
        raise ConfigError("--resume and --overwrite are mutually exclusive.", fix="Remove one of them.")
    planned = _planned(arguments)
    config = config_from(arguments) if planned is None else _planned_config(planned, arguments)
    if arguments.allow_change:
        allowed = config.checkpoint.model_copy(update={"allow_change": arguments.allow_change})
        config = config.model_copy(update={"checkpoint": allowed})
    output = Path(arguments.output) if arguments.output else default_output(arguments, config)
    launch_this_node(arguments, config, output)
    restarted = env.restarted_because() is not None
    summary = run_training(
        config,
        output,
        resume=arguments.resume is not None or restarted,
        overwrite=arguments.overwrite and not restarted,
        readers=progress(f"train {output}", quiet=arguments.json),
        planned=planned,
    )
    show_result(summary, output, as_json=arguments.json)
    return 0


def _planned(arguments: argparse.Namespace) -> Plan | None:
    from pantheraml.runs.plan_here import read_plan

    if arguments.plan is None:
        return None
    if arguments.resume:
        raise ConfigError("--plan is for a new run; --resume continues with the run's own.", fix="Remove one of them.")
    return read_plan(Path(arguments.plan))


def _planned_config(planned: Plan, arguments: argparse.Namespace) -> TrainConfig:
    """Return the plan's configuration with the command line's settings applied, unless a config file is given."""
    from pantheraml.specs.config_file import with_overrides
    from pantheraml.specs.consent import Consent

    if arguments.config is not None or planned.made_for is None:
        return config_from(arguments)
    overrides = given_overrides(arguments)
    config = with_overrides(planned.made_for.config, overrides, whole=arguments.plan)
    if not config.data.path:
        raise ConfigError("The plan was made without data.", where=arguments.plan, fix="Add --data FILE.")
    given = {field: overrides.get(("model", field)) is True for field in CONSENT}
    flags = {field: f"--set model.{field}=true" for field in CONSENT}
    Consent(**given).check(config.model, where=arguments.plan, flags=flags)
    return config


def show_result(summary: dict[str, Any], output: Path, *, as_json: bool) -> None:
    from pantheraml.specs.run_dir import RunDir

    if as_json:
        print(json.dumps(summary, indent=1))
        return
    print(f"Trained weights: {output / summary['output']['path']}")
    if RunDir(output).report.exists():
        print(f"Report:          {RunDir(output).report}")
    print(f'Try it:          pantheraml generate {output} --prompt "..."')
