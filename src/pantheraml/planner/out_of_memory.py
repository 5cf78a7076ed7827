"""A device ran out of memory: what took it, and what to change, by how much. A pure function of what was measured.

Savings are named where they follow from the numbers: states, gradients and weights shrink with their format, and
activations are proportional to the micro-batch. What depends on the model's make-up is named without a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.planner.choose import FP8_CAPABILITY
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import Checkpointing, TrainConfig

STATE_BYTES = {"adamw": 8, "adamw_bf16": 4, "adamw8bit": 2}
"""Of optimizer state, for one trained value."""
PACKED_SHARE = {None: 1.0, "fp8": 0.5, "int8": 0.5, "nf4": 0.27}
"""Of what frozen weights take in bf16; nf4 has scales besides its four bits."""

CHEAPER: dict[Checkpointing, tuple[Checkpointing, ...]] = {
    "none": ("selective", "full", "offload"),
    "selective": ("full", "offload"),
    "full": ("offload",),
    "offload": (),
}


@dataclass(frozen=True)
class MemoryUse:
    """What a device's memory was used for when it ran out, in bytes."""

    frozen_weights: int
    second_layout: int
    """Of frozen fp8 weights, besides."""
    trained_weights: int
    gradients: int
    optimizer_states: int
    activations: int
    """Everything else at the peak: what the backward pass needs, and temporary results."""
    trained_values: int
    """Numbers that are trained."""

    def __str__(self) -> str:
        parts = {
            "weights": self.frozen_weights + self.second_layout + self.trained_weights,
            "gradients": self.gradients,
            "optimizer states": self.optimizer_states,
            "activations": self.activations,
        }
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


@dataclass(frozen=True)
class Shortage:
    """The failed request, as far as it is known."""

    asked: int | None
    free: int | None
    total: int | None
    compute_capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        asked = "" if self.asked is None else f": {_gib(self.asked)} more were asked for"
        if self.free is None or self.total is None:
            return asked
        return f"{asked or ':'}{' and' if asked else ''} {_gib(self.free)} of {_gib(self.total)} were free"


def memory_error(shortage: Shortage, use: MemoryUse | None, config: TrainConfig, plan: Plan) -> OutOfMemoryError:
    device = "GPU" if plan.device == "cuda" else "machine"
    tried = ", with one sequence at a time" if plan.micro_batch_size == 1 else ""
    taken = "" if use is None else f" In use at the peak: {use}."
    ways = "; ".join(advice(shortage, use, config, plan))
    return OutOfMemoryError(
        f"The {device} ran out of memory{tried}{shortage}.{taken}", todo=f"Change one or more of these: {ways}."
    )


def advice(shortage: Shortage, use: MemoryUse | None, config: TrainConfig, plan: Plan) -> list[str]:
    """Settings that need less memory, those that cost the least speed first."""
    ways = []
    if plan.fp8_layouts == 2 and (use is None or use.second_layout):  # a plan of 2 may have come down to 1
        ways.append(f"train.fp8_layouts=1 ({_effect(2, None if use is None else use.second_layout)})")
    if plan.micro_batch_size > 1:
        fewer = plan.micro_batch_size // 2
        saved = None if use is None else use.activations * (1 - fewer / plan.micro_batch_size)
        ways.append(f"train.micro_batch_size={fewer} ({_effect(plan.micro_batch_size, saved)})")
    if config.method.kind == "full":
        ways += _full_fine_tune(use, config, plan)
    else:
        ways += _frozen_base(shortage, use, config, plan)
    modes = CHEAPER[plan.activation_checkpointing]
    if modes:
        listed = " or ".join(f"train.activation_checkpointing={mode}" for mode in modes)
        ways.append(f"{listed} (now {plan.activation_checkpointing}; each keeps fewer activations than the one before)")
    ways.append(f"a shorter data.seq_len (now {config.data.seq_len})")
    if not plan.dims.model_copies_apart:
        ways.append("parallel.shard=N, which divides the weights among N processes")
    return ways


def leaner_resume(plan: Plan) -> str:
    """A setting that needs less memory and that a resumed run may change."""
    modes = CHEAPER[plan.activation_checkpointing]
    mode = "full" if "full" in modes else "offload"
    return f"train.activation_checkpointing={mode}" if modes else "parallel.shard=N"


def _full_fine_tune(use: MemoryUse | None, config: TrainConfig, plan: Plan) -> list[str]:
    ways = []
    optimizer = config.train.optimizer
    if optimizer != "adamw8bit":
        fewer = STATE_BYTES[optimizer] - STATE_BYTES["adamw8bit"]
        saved = None if use is None else fewer * use.trained_values
        ways.append(f"train.optimizer=adamw8bit ({_effect(optimizer, saved)})")
    if config.train.weights == "fp32" and plan.precision == "bf16":
        saved = None if use is None else 2 * 2 * use.trained_values  # two bytes of the weight, two of its gradient
        ways.append(f"train.weights=bf16 ({_effect('fp32', saved)})")
    ways.append("method.kind=lora, which trains small adapters instead of every weight")
    return ways


def _frozen_base(shortage: Shortage, use: MemoryUse | None, config: TrainConfig, plan: Plan) -> list[str]:
    """Smaller formats for weights that are not trained."""

    def saved(form: str) -> float | None:
        share = PACKED_SHARE[form] / PACKED_SHARE[plan.frozen_weights]
        return None if use is None else use.second_layout + use.frozen_weights * (1 - share)

    ways = []
    capable = shortage.compute_capability is not None and shortage.compute_capability >= FP8_CAPABILITY
    now = plan.frozen_weights or plan.precision
    if plan.frozen_weights is None and config.method.kind == "lora" and capable:
        ways.append(f"model.precision=fp8 ({_effect(now, saved('fp8'))})")
    if plan.frozen_weights != "nf4":
        ways.append(f"method.kind=qlora, frozen weights in 4 bits ({_effect(now, saved('nf4'))})")
    return ways


def _effect(now: object, saved: float | None) -> str:
    return f"now {now}" if saved is None else f"now {now}; saves about {_gib(saved)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
