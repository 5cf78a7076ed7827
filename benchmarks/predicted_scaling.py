"""Predicted plans of 8B and 70B models on 1 to 4,096 H100s, for docs/planner.md. Nothing in it was measured.

python benchmarks/predicted_scaling.py       print the tables
"""

from __future__ import annotations

import dataclasses

from table import markdown_table

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import OutOfMemoryError
from pantheraml.devices.fake import parse_cluster
from pantheraml.planner.facts import device_facts
from pantheraml.planner.known_rates import known_rates
from pantheraml.planner.links import Links
from pantheraml.planner.plan_run import plan_run
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

GPUS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
MODELS = ("Llama-3.1-8B", "Llama-3.1-70B")
METHODS = ("lora", "full")
NETWORK_GBITS = 3200
PER_GPU, SEQ_LEN = 2, 2048
HEADS = ("GPUs", "plan", "checkpointing", "micro-batch", "memory", "step", "tokens/s", "per GPU", "waiting for others")


def tables() -> str:
    lines = []
    for model in MODELS:
        for method in METHODS:
            rows = [_row(model, method, count) for count in GPUS]
            lines += [f"**{model}, {method}**", "", *markdown_table(HEADS, rows), ""]
    return "\n".join(lines).rstrip()


def _row(model: str, method: str, count: int) -> list[str]:
    try:
        plan = plan_for(model, method, count)
    except OutOfMemoryError as err:
        need = err.what.partition("at least ")[2].partition(" would")[0]
        return [f"{count:,}", f"does not fit: at least {need} per GPU", *["–"] * (len(HEADS) - 2)]
    prediction = plan.prediction
    assert prediction is not None and prediction.memory is not None  # noqa: PT018
    assert prediction.step_seconds is not None
    speed = plan.global_batch_size * SEQ_LEN / prediction.step_seconds
    waits = (prediction.time_parts["communication"] + prediction.time_parts["bubble"]) / prediction.step_seconds
    return [
        f"{count:,}",
        str(plan.dims),
        plan.activation_checkpointing,
        str(plan.micro_batch_size),
        f"{prediction.memory.allocated_bytes / 2**30:.1f} GiB",
        f"{prediction.step_seconds:.2f} s",
        f"{speed:,.0f}",
        f"{speed / count:,.0f}",
        f"{100 * waits:.0f} %",
    ]


def plan_for(model: str, method: str, count: int) -> Plan:
    """The plan for `count` GPUs, in nodes of eight, with a global batch that grows with them."""
    nodes, per_node = max(1, count // 8), min(8, count)
    cluster = parse_cluster(f"{nodes}x{per_node}xH100-80GB nvlink, {NETWORK_GBITS}Gb")
    assert cluster.model is not None
    train = {"global_batch_size": PER_GPU * count, "weights": "bf16", "optimizer": "adamw_bf16"}
    config = TrainConfig.model_validate(
        {
            "model": {"path": model},
            "data": {"path": "", "seq_len": SEQ_LEN},
            "method": {"kind": method},
            "train": train if method == "full" else {"global_batch_size": PER_GPU * count},
            "device": "cuda",
        }
    )
    devices, place = cluster.device_spec(), None
    if nodes > 1:
        config = config.model_copy(update={"parallel": dataclasses.replace(config.parallel, world_size=count)})
        place = ProcessRank(0, 0, count, per_node)
    links = Links(per_node, known_rates(cluster.model).link_gb_s, NETWORK_GBITS / 8)
    return plan_run(config, devices, place, hardware=device_facts(devices.gpus, model=cluster.model, links=links))


if __name__ == "__main__":
    print(tables())
