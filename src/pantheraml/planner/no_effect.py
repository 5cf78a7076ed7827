"""Settings that a run would not read, because another one rules them out: each is told with the one that wins.

Set is what differs from its default, and what was written though it does not, if it turns something on. A section that
lists every key is that of a run folder, which nobody wrote by hand: there only the values count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import DataConfig, ModelConfig, StabilityConfig, TrainConfig, TrainSettings

Unread = tuple[tuple[str, ...], str]
"""Keys, and why nothing reads them."""

_CLIPPING_READS: dict[str, tuple[str, ...]] = {
    "none": (),
    "value": ("stability.clip_value",),
    "norm": ("train.max_grad_norm",),
    "global_norm": ("train.max_grad_norm",),
    "adaptive": ("stability.clip_weight_ratio",),
    "percentile": (
        *("train.max_grad_norm", "stability.clip_percentile", "stability.clip_history"),
        "stability.clip_warmup_steps",
    ),
    "zclip": (
        *("train.max_grad_norm", "stability.clip_zscore", "stability.clip_decay"),
        "stability.clip_warmup_steps",
    ),
    "adagc": (
        *("train.max_grad_norm", "stability.clip_growth", "stability.clip_decay"),
        "stability.clip_warmup_steps",
    ),
}
"""stability.clipping -> the keys that it reads."""

_ADAPTER = ("method.rank", "method.alpha", "method.dropout", "method.target_modules", "method.rslora")
_BETWEEN_RANKS = tuple(
    f"parallel.{name}"
    for name in (
        *("aggregation", "aggregation_weights", "leave_out_nonfinite", "batch_shares", "check_every"),
        *("min_world_size", "strict", "enable_multi_gpu_monitoring", "sync_bn"),
    )
)
_DDP = tuple(
    f"parallel.{name}"
    for name in (
        *("find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers", "static_graph"),
        "bucket_cap_mb",
    )
)


def without_effect(config: TrainConfig, dims: ParallelDims, *, frozen_fp8: bool) -> tuple[str, ...]:
    """One sentence for each setting that is not read."""
    usual = TrainConfig(model=ModelConfig(path=""), data=DataConfig(path=""))
    rules = (*_method(config), *_schedule(config), *_guard(config.stability), *_ends(config, frozen_fp8=frozen_fp8))
    written = _written(config)
    told: dict[str, str] = {}
    for keys, reason in (*rules, *_processes(config, dims)):
        for key in keys:
            value = _value(config, key)
            if value != _value(usual, key) or (value and key in written):
                told.setdefault(key, f"{key}={_shown(value)} has no effect: {reason}")
    return tuple(told.values())


def _written(config: TrainConfig) -> set[str]:
    """Keys that somebody wrote; of `parallel`, a dataclass, that is not known."""
    sections = {
        name: part for name in type(config).model_fields if isinstance(part := getattr(config, name), BaseModel)
    }
    return {
        f"{name}.{key}"
        for name, part in sections.items()
        for key in part.model_fields_set
        if part.model_fields_set < set(type(part).model_fields)
    }


def long_warmup(train: TrainSettings, steps: int) -> str | None:
    """Warning about a warm-up that takes the whole run of so many steps; None where it does not."""
    if train.warmup_steps < max(2, steps):
        return None
    return (
        f"train.warmup_steps={train.warmup_steps} takes the whole run of {steps} step(s): the learning rate reaches"
        f" {train.learning_rate * steps / train.warmup_steps:.3g}, train.schedule has no effect"
    )


def _method(config: TrainConfig) -> Iterator[Unread]:
    if config.method.kind == "full":
        yield _ADAPTER, "method.kind=full trains every weight, without an adapter"
    if config.model.revision is not None and Path(config.model.path).expanduser().is_dir():
        yield ("model.revision",), f"{config.model.path} is a folder on this machine, not a hub name"


def _schedule(config: TrainConfig) -> Iterator[Unread]:
    train = config.train
    if train.max_steps is not None:
        yield ("train.epochs",), f"train.max_steps={train.max_steps} decides how long the run is"
    if train.schedule == "constant":
        yield ("train.min_learning_rate_ratio",), "train.schedule=constant stays at the peak"


def _guard(stability: StabilityConfig) -> Iterator[Unread]:
    read = _CLIPPING_READS[stability.clipping]
    unread = {key for keys in _CLIPPING_READS.values() for key in keys} - set(read)
    reads = " and ".join(read) if read else "none of the limits"
    yield tuple(sorted(unread)), f"stability.clipping={stability.clipping} reads {reads}"
    policies = (stability.on_nonfinite, stability.on_spike)
    said = f"stability.on_nonfinite={stability.on_nonfinite}, on_spike={stability.on_spike}"
    if stability.on_spike == "ignore":
        yield ("stability.spike_zscore", "stability.spike_warmup_steps"), "stability.on_spike=ignore"
    if "lower_rate" not in policies:
        yield ("stability.rate_factor",), f"nothing lowers the rate ({said})"
    if not {"skip", "zero", "lower_rate"} & set(policies):
        yield ("stability.max_skipped_steps", "stability.max_skipped_total"), f"no step is skipped ({said})"
    if not stability.rolls_back:
        yield ("stability.rollback_steps", "stability.max_rollbacks"), f"nothing rolls back ({said})"


def _ends(config: TrainConfig, *, frozen_fp8: bool) -> Iterator[Unread]:
    if config.train.eval_every_steps is None and config.checkpoint.every_steps is None:
        yield ("checkpoint.keep",), "without checkpoint.every_steps there is one checkpoint, at the end"
    if config.train.eval_every_steps is None and config.checkpoint.final == "best":
        yield (
            ("checkpoint.final",),
            "without train.eval_every_steps there is one evaluation, at the end, and the last weights are the best",
        )
    if not config.report.sinks:
        yield ("report.project",), "report.sinks names no tool"
    if not frozen_fp8:
        yield ("train.fp8_layouts",), "no frozen weights are in fp8"


def _processes(config: TrainConfig, dims: ParallelDims) -> Iterator[Unread]:
    parallel = config.parallel
    if parallel.mode is not MultiGPUMode.AUTO:
        yield ("parallel.auto_policy",), f"parallel.mode={parallel.mode}"
    if parallel.mode is not MultiGPUMode.HYBRID:
        yield ("parallel.hybrid_strategy",), f"parallel.mode={parallel.mode}"
    if parallel.max_retries == 0:
        yield ("parallel.restart_on", "parallel.min_world_size"), "parallel.max_retries=0"
    if dims.world_size == 1:
        yield (*_BETWEEN_RANKS, *_DDP), "the run has one process"
    elif dims.world_size > dims.replicate * dims.context:
        yield _DDP, f"only copies of whole models use DDP, and the model is divided ({dims})"


def _value(config: TrainConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
