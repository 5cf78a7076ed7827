"""Warn about settings that another setting makes irrelevant, and name that setting.

A setting counts as set if it differs from its default, or if it was written explicitly and turns something on. A
section that lists every key comes from a run folder, not from a user: there only values that differ count.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from pantheraml.specs.multi_gpu import MultiGPUMode
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import DataConfig, ModelConfig, StabilityConfig, TrainConfig, TrainSettings

IgnoredKeys = tuple[tuple[str, ...], str]
"""Keys without effect, and the reason."""

_CLIPPING_KEYS: dict[str, tuple[str, ...]] = {
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
"""stability.clipping -> the keys that it uses."""

_ADAPTER = (
    "method.rank",
    "method.alpha",
    "method.dropout",
    "method.target_modules",
    "method.target_parameters",
    "method.rslora",
)
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


def ignored_settings(config: TrainConfig, dims: ParallelDims, *, device: Literal["cpu", "cuda"]) -> tuple[str, ...]:
    """Return one sentence per setting that is set but has no effect."""
    defaults = TrainConfig(model=ModelConfig(path=""), data=DataConfig(path=""))
    rules = (*_method(config), *_schedule(config), *_guard(config.stability), *_ends(config))
    explicit = _explicit_keys(config)
    messages: dict[str, str] = {}
    if device == "cpu":
        rules += ((("parallel.memory_fraction",), "the run is on the CPU"),)
    for keys, reason in (*rules, *_processes(config, dims)):
        for key in keys:
            value = _value(config, key)
            if value != _value(defaults, key) or (value and key in explicit):
                messages.setdefault(key, f"{key}={_format(value)} has no effect: {reason}")
    return tuple(messages.values())


def _explicit_keys(config: TrainConfig) -> set[str]:
    """Return the keys that were written explicitly; unknown for `parallel`, which is a dataclass."""
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
    """Warning about a warmup that takes the whole run of `steps` steps; None if it does not."""
    if train.warmup_steps < max(2, steps):
        return None
    rate = train.learning_rate
    reached = "less than its peak" if rate == "auto" else f"{rate * steps / train.warmup_steps:.3g}"
    return (
        f"train.warmup_steps={train.warmup_steps} takes the whole run of {steps} step(s): the learning rate reaches"
        f" {reached}, train.schedule has no effect"
    )


def _method(config: TrainConfig) -> Iterator[IgnoredKeys]:
    if config.method.kind == "full":
        yield _ADAPTER, "method.kind=full has no adapter"
    if config.model.revision is not None and Path(config.model.path).expanduser().is_dir():
        yield ("model.revision",), f"{config.model.path} is a local folder, not a hub name"


def _schedule(config: TrainConfig) -> Iterator[IgnoredKeys]:
    train = config.train
    if train.max_steps is not None:
        yield ("train.epochs",), f"train.max_steps={train.max_steps} sets the length of the run"
    if train.schedule == "constant":
        yield ("train.min_learning_rate_ratio",), "train.schedule=constant stays at the peak learning rate"


def _guard(stability: StabilityConfig) -> Iterator[IgnoredKeys]:
    used = _CLIPPING_KEYS[stability.clipping]
    unused = {key for keys in _CLIPPING_KEYS.values() for key in keys} - set(used)
    listed = " and ".join(used) if used else "none of the limits"
    yield tuple(sorted(unused)), f"stability.clipping={stability.clipping} uses {listed}"
    policies = (stability.on_nonfinite, stability.on_spike)
    settings = f"stability.on_nonfinite={stability.on_nonfinite}, on_spike={stability.on_spike}"
    if stability.on_spike == "ignore":
        yield ("stability.spike_zscore", "stability.spike_warmup_steps"), "stability.on_spike=ignore"
    if "lower_rate" not in policies:
        yield ("stability.rate_factor",), f"nothing lowers the learning rate ({settings})"
    if not {"skip", "zero", "lower_rate"} & set(policies):
        yield ("stability.max_skipped_steps", "stability.max_skipped_total"), f"no step is skipped ({settings})"
    if not stability.rolls_back:
        yield ("stability.rollback_steps", "stability.max_rollbacks"), f"nothing rolls back ({settings})"


def _ends(config: TrainConfig) -> Iterator[IgnoredKeys]:
    if config.train.eval_every_steps is None and config.checkpoint.every_steps is None:
        yield ("checkpoint.keep",), "without checkpoint.every_steps the only checkpoint is at the end"
    if config.train.eval_every_steps is None and config.checkpoint.final == "best":
        yield (
            ("checkpoint.final",),
            "without train.eval_every_steps the only evaluation is at the end, so the last weights are the best",
        )
    if not config.report.sinks:
        yield ("report.project",), "report.sinks is empty"


def _processes(config: TrainConfig, dims: ParallelDims) -> Iterator[IgnoredKeys]:
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
        yield _DDP, f"the run does not use DDP, because the model is sharded ({dims})"


def _value(config: TrainConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _format(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
