"""`pantheraml plan`: whether a run fits, how long it takes and with which settings, without starting it."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pantheraml.base.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pantheraml.base.env import ProcessRank
    from pantheraml.cli.plan_data import Lengths
    from pantheraml.devices.fake import Cluster
    from pantheraml.planner.facts import DeviceFacts, ModelFacts
    from pantheraml.specs.plan import Choice, DeviceSpec, Plan
    from pantheraml.specs.train import TrainConfig


def add(commands: Any) -> argparse.ArgumentParser:
    from pantheraml.cli.train import add_config_options

    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="show whether a run fits, how long it takes, and why",
        description="Show every choice that a run would make, with its reason, and the predicted memory and time,"
        " without starting it. --data is optional; with it, the length of the run is estimated.",
    )
    add_config_options(parser)
    parser.add_argument(
        "--gpus", metavar="TEXT", help='plan for this hardware instead: "8xH100-80GB", "2x8xH100-80GB nvlink, 400Gb"'
    )
    parser.add_argument("--price", type=float, metavar="N", help="price of a GPU per hour, to show what the run costs")
    parser.add_argument(
        "--explain", action="store_true", help="also show all compared plans and where figures are from"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, which `train --plan` replays")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.price is not None and not 0 < arguments.price < math.inf:
        raise ConfigError(
            f"--price must be more than 0, and finite, not {arguments.price:g}.", fix="For example: --price 2.50"
        )
    config = _config(arguments)
    plan, facts, devices = _plan(arguments, config)
    if arguments.json:
        from pantheraml.runs.plan_here import inputs_of

        plan = plan.model_copy(update={"made_for": inputs_of(config, devices)})
        print(json.dumps(plan.model_dump(mode="json"), indent=1))
        return 0
    from pantheraml.cli.plan_view import show

    show(plan, config, facts, explain=arguments.explain)
    return 0


def _config(arguments: argparse.Namespace) -> TrainConfig:
    from pantheraml.cli.train import config_from, given_overrides

    if arguments.config is None:
        given = given_overrides(arguments)
        if ("model", "path") not in given:
            raise ConfigError(
                "Nothing to plan: pass a config file, or --model.",
                fix='For example: pantheraml plan --model meta-llama/Llama-3.1-8B --gpus "1xH100"',
            )
        if ("data", "path") not in given:
            arguments.data = ""  # planned for full sequences
    return config_from(arguments)


def _plan(arguments: argparse.Namespace, config: TrainConfig) -> tuple[Plan, ModelFacts, DeviceSpec]:
    from pantheraml.devices.select import devices_for_run
    from pantheraml.planner.no_effect import long_warmup
    from pantheraml.planner.plan_run import Outlook, plan_run, total_steps

    place, hardware, cluster = None, None, None
    asked = config.parallel.world_size is not None
    if arguments.gpus is None:
        facts = _checked(config)
        devices = devices_for_run(config)
    else:
        from pantheraml.devices.fake import parse_cluster

        cluster = parse_cluster(arguments.gpus)
        facts = _checked(config)
        devices = cluster.device_spec()
        config, place, hardware = _described(cluster, config)
    lengths = _lengths(config)
    sequences = None if lengths is None else lengths.sequences(config.data.seq_len, packed=config.data.packing)
    outlook = Outlook(sequences, arguments.price)
    plan = plan_run(config, devices, place, model=facts, hardware=hardware, outlook=outlook)
    if cluster is not None:
        plan = plan.model_copy(update={"choices": _of_description(plan.choices, cluster, asked=asked)})
    steps = total_steps(config, sequences)
    tokens = None if lengths is None else lengths.trained(config)
    more = filter(None, (_rank(config, facts, tokens), _learning_rate(config, facts, steps)))
    plan = plan.model_copy(update={"choices": (*plan.choices, *more)})
    told = (None if steps is None else long_warmup(config.train, steps), _beyond_positions(config, facts, lengths))
    warnings = tuple(message for message in told if message is not None)
    return plan.model_copy(update={"warnings": (*plan.warnings, *warnings)}), facts, devices


def _beyond_positions(config: TrainConfig, facts: ModelFacts, lengths: Lengths | None) -> str | None:
    """Warning if documents may be longer than the model's positions, which ends a run before its first step."""
    positions, seq_len = facts.positions, config.data.seq_len
    if positions is None or seq_len <= positions:
        return None
    longest = None if lengths is None else min(seq_len, max(lengths.tokens))
    if longest is not None and longest <= positions:
        return None
    found = "a longer document" if longest is None else f"the data has a row of some {longest:,} tokens, which"
    return f"data.seq_len={seq_len} is above the model's {positions:,} positions: {found} would end the run at once"


def _learning_rate(config: TrainConfig, facts: ModelFacts, steps: int | None) -> Choice:
    from pantheraml.planner.defaults import learning_rate_choice

    return learning_rate_choice(config, facts.family, facts.hidden, steps)


def _rank(config: TrainConfig, facts: ModelFacts, tokens: float | None) -> Choice | None:
    from pantheraml.planner.defaults import rank_choice

    if facts.shapes is None or tokens is None:
        return None
    parameters = facts.shapes.lora_parameters(config.method.rank, config.method.target_modules)
    return rank_choice(config, parameters, tokens)


def _checked(config: TrainConfig) -> ModelFacts:
    """Return facts of the model, and check the inputs that exist here. A known model needs no folder."""
    from pantheraml.cli.inputs import check_data, check_model
    from pantheraml.planner.facts import model_facts
    from pantheraml.planner.known_models import known_config, nearest_name

    if not Path(config.model.path).expanduser().exists() and known_config(config.model.path) is not None:
        if config.data.path:
            check_data(config)
        return model_facts(config.model)
    try:
        folder = check_model(config)
    except ModelError as err:
        near = nearest_name(config.model.path)
        if Path(config.model.path).expanduser().is_dir() or near is None:
            raise
        fix = f"{err.fix or ''} The sizes of {near} are known here, for example.".strip()
        raise ModelError(err.what, where=err.where, fix=fix) from err
    if config.data.path:
        check_data(config)
    facts = model_facts(config.model, folder)
    if facts.invalid:
        raise ModelError(
            f"The model cannot be planned: {facts.why_unknown}.",
            where=str(folder / "config.json"),
            fix="Correct it, or download the model again.",
        )
    return facts


def _described(cluster: Cluster, config: TrainConfig) -> tuple[TrainConfig, ProcessRank | None, DeviceFacts | None]:
    """Return configuration, rank and hardware facts of a run on a cluster given by a description."""
    import dataclasses

    from pantheraml.base.env import ProcessRank
    from pantheraml.planner.facts import device_facts
    from pantheraml.planner.known_rates import known_rates
    from pantheraml.planner.links import Links

    if cluster.model is None:
        return config, None, None
    place = None
    if cluster.nodes > 1:
        world_size = config.parallel.world_size or cluster.nodes * cluster.gpus_per_node
        config = config.model_copy(update={"parallel": dataclasses.replace(config.parallel, world_size=world_size)})
        place = ProcessRank(0, 0, world_size, min(world_size, cluster.gpus_per_node))
    link = known_rates(cluster.model).link_gb_s if cluster.nvlink else None
    network = None if cluster.network_gbits is None else cluster.network_gbits / 8
    hardware = device_facts(
        cluster.device_spec().gpus,
        model=cluster.model,
        links=Links(cluster.gpus_per_node, link, network),
        memory_fraction=config.parallel.memory_fraction,
    )
    return config, place, hardware


def _of_description(choices: tuple[Choice, ...], cluster: Cluster, *, asked: bool) -> tuple[Choice, ...]:
    """The choices in words that do not claim that hardware was found, or cores that nobody named.

    `asked`: the configuration says how many processes there are.
    """
    reasons = {}
    if cluster.model is not None and any(each.name == "device" and each.automatic for each in choices):
        reasons["device"] = f"described: {cluster.text}"
        if cluster.nodes > 1 and not asked:
            reasons["parallel.world_size"] = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPU(s)"
    unknown = {"threads_per_process"} if cluster.cpu_count is None else set()
    return tuple(
        each.model_copy(update={"reason": reasons[each.name], "automatic": True}) if each.name in reasons else each
        for each in choices
        if each.name not in unknown
    )


def _lengths(config: TrainConfig) -> Lengths | None:
    """Estimate the lengths of rows from the beginning of the data; None: no data, or no local tokenizer."""
    if not config.data.path:
        return None
    from pantheraml.cli.plan_data import estimate

    return estimate(config)
