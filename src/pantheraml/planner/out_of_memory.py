"""Out-of-memory errors: what used the memory, and which settings save how much. Pure functions of measured sizes.

Savings are given where they follow from the numbers: optimizer states, gradients and weights scale with their dtype,
activations with the micro-batch. Those that depend on the architecture are given where the planner predicts its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pantheraml.base.errors import OutOfMemoryError
from pantheraml.planner.memory import predict_memory
from pantheraml.planner.model_shapes import ModelShapes
from pantheraml.planner.precision import FP8_CAPABILITY
from pantheraml.planner.setting import setting_of
from pantheraml.specs.plan import Plan
from pantheraml.specs.train import Checkpointing, TrainConfig

STATE_BYTES = {"adamw": 8, "adamw_bf16": 4, "adamw8bit": 2}
"""Bytes of optimizer state per trainable parameter."""
FROZEN_WEIGHT_SHARE = {None: 1.0, "fp8": 0.5, "int8": 0.5, "nf4": 0.27}
"""Memory of frozen weights relative to bf16; nf4 has scales in addition to its four bits."""

LEANER_CHECKPOINTING: dict[Checkpointing, tuple[Checkpointing, ...]] = {
    "none": ("selective", "full", "offload"),
    "selective": ("full", "offload"),
    "full": ("offload",),
    "offload": (),
}


@dataclass(frozen=True)
class MemoryUse:
    """Use of a device's memory when it ran out, in bytes."""

    frozen_weights: int
    trained_weights: int
    gradients: int
    optimizer_states: int
    activations: int
    """Everything else at the peak: activations saved for the backward, and temporary tensors."""
    trainable_params: int
    """Number of trainable parameters."""

    def __str__(self) -> str:
        parts = {
            "weights": self.frozen_weights + self.trained_weights,
            "gradients": self.gradients,
            "optimizer states": self.optimizer_states,
            "activations": self.activations,
        }
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


@dataclass(frozen=True)
class Shortage:
    """The failed allocation; None: unknown."""

    requested: int | None
    free: int | None
    total: int | None
    compute_capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        requested = "" if self.requested is None else f": tried to allocate {_gib(self.requested)}"
        if self.free is None or self.total is None:
            return requested
        return f"{requested or ':'}{' with' if requested else ''} {_gib(self.free)} of {_gib(self.total)} free"


def memory_error(
    shortage: Shortage, use: MemoryUse | None, config: TrainConfig, plan: Plan, shapes: ModelShapes | None = None
) -> OutOfMemoryError:
    """Build the error. `shapes`: of the model; None: not known."""
    device = "GPU" if plan.device == "cuda" else "machine"
    smallest = " with a micro-batch of 1" if plan.micro_batch_size == 1 else ""
    peak = "" if use is None else f" Peak use: {use}."
    settings = "; ".join(advice(shortage, use, config, plan, shapes))
    return OutOfMemoryError(
        f"The {device} ran out of memory{smallest}{shortage}.{peak}", fix=f"Change one or more of these: {settings}."
    )


def advice(
    shortage: Shortage, use: MemoryUse | None, config: TrainConfig, plan: Plan, shapes: ModelShapes | None = None
) -> list[str]:
    """Return settings that save memory, cheapest in speed first."""
    ways = []
    if plan.micro_batch_size > 1:
        fewer = plan.micro_batch_size // 2
        saved = None if use is None else use.activations * (1 - fewer / plan.micro_batch_size)
        ways.append(f"train.micro_batch_size={fewer} ({_effect(plan.micro_batch_size, saved)})")
    if config.method.kind == "full":
        ways += _full_fine_tune(use, config, plan)
    else:
        ways += _frozen_base(shortage, use, config, plan)
    ways += _leaner_checkpointing(config, plan, shapes)
    ways.append(f"a shorter data.seq_len (now {config.data.seq_len})")
    if not plan.dims.model_is_sharded:
        ways.append("parallel.shard=N, which shards the weights over N processes")
    return ways


def _leaner_checkpointing(config: TrainConfig, plan: Plan, shapes: ModelShapes | None) -> list[str]:
    now = plan.activation_checkpointing
    modes = leaner_modes(plan)
    saved = {} if shapes is None else _predicted_savings(config, plan, shapes, modes)
    if saved:
        known = ((mode, size) for mode, size in saved.items() if size > 0)
        return [f"train.activation_checkpointing={mode} ({_effect(now, size)})" for mode, size in known]
    listed = " or ".join(f"train.activation_checkpointing={mode}" for mode in modes)
    return [f"{listed} (now {now}; each needs less memory than the one before)"] if modes else []


def leaner_modes(plan: Plan) -> tuple[Checkpointing, ...]:
    """Modes that need less memory. Fused fp8 layers keep less than `selective` stores: the outputs of their matmuls."""
    fp8 = plan.fused and (plan.frozen_weights in ("fp8", "nf4") or plan.fp8_matmuls)
    modes = LEANER_CHECKPOINTING[plan.activation_checkpointing]
    return tuple(mode for mode in modes if not (fp8 and mode == "selective"))


def _predicted_savings(
    config: TrainConfig, plan: Plan, shapes: ModelShapes, modes: Sequence[Checkpointing]
) -> dict[Checkpointing, int]:
    """Bytes that each mode saves of the predicted peak; empty: not predicted."""
    setting = setting_of(config, plan)
    now = predict_memory(shapes, setting)
    if now is None:
        return {}
    found = {}
    for mode in modes:  # recomputed layers are compiled only if that was asked for
        changes = {"activation_checkpointing": mode, "compile": config.train.compile == "on"}
        then = predict_memory(shapes, setting.model_copy(update=changes))
        if then is not None:
            found[mode] = now.allocated_bytes - then.allocated_bytes
    return found


def leaner_resume(plan: Plan) -> str:
    """Return a setting that saves memory and may change when a run is resumed."""
    modes = LEANER_CHECKPOINTING[plan.activation_checkpointing]
    mode = "full" if "full" in modes else "offload"
    return f"train.activation_checkpointing={mode}" if modes else "parallel.shard=N"


def _full_fine_tune(use: MemoryUse | None, config: TrainConfig, plan: Plan) -> list[str]:
    ways = []
    optimizer = config.train.optimizer
    if optimizer != "adamw8bit":
        fewer = STATE_BYTES[optimizer] - STATE_BYTES["adamw8bit"]
        saved = None if use is None else fewer * use.trainable_params
        ways.append(f"train.optimizer=adamw8bit ({_effect(optimizer, saved)})")
    if config.train.weights == "fp32" and plan.precision == "bf16":
        saved = None if use is None else 2 * 2 * use.trainable_params  # two bytes per weight, two per gradient
        ways.append(f"train.weights=bf16 ({_effect('fp32', saved)})")
    ways.append("method.kind=lora, which trains adapters instead of all weights")
    return ways


def _frozen_base(shortage: Shortage, use: MemoryUse | None, config: TrainConfig, plan: Plan) -> list[str]:
    """Return smaller formats for the frozen weights."""

    def saved(quantized: str) -> float | None:
        share = FROZEN_WEIGHT_SHARE[quantized] / FROZEN_WEIGHT_SHARE[plan.frozen_weights]
        return None if use is None else use.frozen_weights * (1 - share)

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
