"""CPU slots that a job takes by its memory: each stands for an equal share of this machine's.

The planner predicts the memory of GPUs alone. On CPUs, what certainly is needed is known from the sizes of the model:
its weights and, of those that are trained, gradients and optimizer states.
"""

from __future__ import annotations

import math

from pantheraml.base.errors import OutOfMemoryError, PantheraError
from pantheraml.planner.candidates import count_trained
from pantheraml.planner.facts import model_facts
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import TrainConfig

_STATES = {"adamw": 8, "adamw_bf16": 4, "adamw8bit": 2}
"""Bytes of a trained weight's optimizer states."""


def slots_for(config: TrainConfig, plan: Plan, slots: int, ram_bytes: int) -> tuple[int, int | None]:
    """Return the slots that the job takes, of `slots`, and the bytes that it certainly needs (None: not known).

    OutOfMemoryError if this machine has less memory.
    """
    needed = certain_bytes(config, plan)
    if needed is None:
        return plan.world_size, None
    if needed > ram_bytes:
        raise OutOfMemoryError(
            f"This run does not fit into the memory of this machine: at least {_gib(needed)} would be needed, and there"
            f" are {_gib(ram_bytes)}.",
            fix="Use a smaller model, method.kind=lora with a smaller method.rank, or fewer processes.",
        )
    return max(plan.world_size, math.ceil(needed * slots / ram_bytes)), needed


def certain_bytes(config: TrainConfig, plan: Plan) -> int | None:
    """Return the bytes of weights, gradients and optimizer states over all processes; None: not known."""
    shapes = model_facts(config.model).shapes
    if shapes is None:
        return None
    full = config.method.kind == "full"
    try:
        trained = count_trained(config.method, shapes)
    except PantheraError:  # names of layers that the planner does not know; the run may
        trained = 0
    of_weight = 2 if full and config.train.weights == "bf16" else 4
    size = trained * (2 * of_weight + _STATES[config.train.optimizer])
    if not full:
        plain = shapes.parameters * (4 if plan.precision == "fp32" else 2)
        size += plain if plan.frozen_weights is None else sum(shapes.frozen_bytes(plan.frozen_weights).values())
    dims = plan.dims
    return size * dims.world_size // (dims.shard * dims.tensor * dims.pipeline)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
