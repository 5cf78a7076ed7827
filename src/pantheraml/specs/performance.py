"""PerformanceConfig: multi-GPU wrapping and optimizations of custom training loops (`pantheraml.performance`).

`MultiGPUConfig` also configures `pantheraml train`, which loads, feeds and saves the model itself. Settings that have
no effect on the user's own loop are refused, with a pointer to where they belong.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pantheraml.base.errors import ConfigError
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.own_loop_configs import CHECKPOINTING, OwnLoopConfig, PerformanceOptimizationConfig, one_switch
from pantheraml.specs.section_errors import without_fix


class OptimizationLevel(StrEnum):
    """Levels of `PerformanceConfig.optimization_level`; each includes the one before."""

    NONE = "none"
    """Only what is set by name."""
    BASIC = "basic"
    """The optimizer's fused kernel, pinned memory, and data workers that persist; numerics as before."""
    ADVANCED = "advanced"
    """bf16 autocast and TF32 matmuls on GPUs that have them."""
    ULTRA = "ultra"
    """torch.compile."""

    def includes(self, other: OptimizationLevel) -> bool:
        order = list(OptimizationLevel)
        return order.index(self) >= order.index(other)


ONLY_IN_TRAIN = (
    *("replicate", "shard", "tensor", "pipeline", "context", "stages_per_process"),
    *("aggregation", "aggregation_weights", "leave_out_nonfinite", "batch_shares"),
    *("check_every", "restart_on", "min_world_size", "grace_seconds", "memory_fraction"),
)
"""Fields of MultiGPUConfig that only `pantheraml train` reads."""


class PerformanceConfig(OwnLoopConfig):
    PAGE = "docs/own-loop.md"

    optimization_level: OptimizationLevel = OptimizationLevel.BASIC
    """How much to optimize: none, basic, advanced or ultra."""
    multi_gpu_config: MultiGPUConfig = Field(default_factory=MultiGPUConfig)
    """Processes, devices and DDP options."""
    enable_multi_gpu: bool = True
    """False: models are not wrapped. `use_multi_gpu` is another name."""
    enable_mixed_precision: bool | None = None
    """bf16 autocast around the model's forward, on GPUs that have bf16; None = from level advanced."""
    enable_compile: bool | None = None
    """torch.compile, per decoder layer where the model has them; None = from level ultra."""
    enable_gradient_checkpointing: bool | Literal["unsloth"] = Field(default=False, description=CHECKPOINTING)
    split_points: list[str] | None = None
    """mode=hybrid with hybrid_strategy=pipeline or model_parallel: modules at which the next GPU's part begins; None =
    parts of about equal size."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """mode=hybrid with hybrid_strategy=pipeline: parts of each batch that are in flight; None = two per GPU."""

    _one_switch = model_validator(mode="before")(one_switch)

    @model_validator(mode="after")
    def _check_consistency(self) -> PerformanceConfig:
        multi_gpu = _checked(self.multi_gpu_config)
        strategy = multi_gpu.hybrid_strategy if multi_gpu.mode is MultiGPUMode.HYBRID else None
        if self.split_points is not None and strategy not in ("pipeline", "model_parallel"):
            raise ValueError("split_points is for mode=hybrid with hybrid_strategy=pipeline or model_parallel")
        if self.micro_batches is not None and strategy != "pipeline":
            raise ValueError("micro_batches is for mode=hybrid with hybrid_strategy=pipeline")
        asked = multi_gpu.use_gradient_checkpointing
        if asked is False and self.enable_gradient_checkpointing:
            raise ValueError("use_gradient_checkpointing=False and enable_gradient_checkpointing contradict each other")
        return self

    @classmethod
    def of(cls, config: PerformanceOptimizationConfig) -> PerformanceConfig:
        """Return the equivalent of a config of `pantheraml.stability`, which leaves optimizer and precision alone."""
        return cls(
            optimization_level=OptimizationLevel.NONE,
            multi_gpu_config=config.to_multi_gpu_config(),
            enable_gradient_checkpointing=config.enable_gradient_checkpointing,
        )

    @property
    def multi_gpu(self) -> MultiGPUConfig:
        """The checked multi_gpu_config; mode none if multi-GPU is disabled."""
        try:
            config = _checked(self.multi_gpu_config)
        except ValueError as err:  # also pydantic's, of a field that was assigned
            reason = without_fix(err.errors()[0]["msg"]) if isinstance(err, ValidationError) else err
            raise ConfigError(f"MultiGPUConfig: {reason}.", fix="See docs/configuration.md, section parallel.") from err
        if self.enable_multi_gpu:
            return config
        return dataclasses.replace(config, mode=MultiGPUMode.NONE, enable_hybrid=False, output_device=None)

    @property
    def checkpointing(self) -> bool | Literal["unsloth"]:
        return self.enable_gradient_checkpointing or self.multi_gpu_config.use_gradient_checkpointing or False

    @property
    def mixed_precision(self) -> bool:
        """Whether bf16 is to be used where the device has it."""
        if self.enable_mixed_precision is None:
            return self.optimization_level.includes(OptimizationLevel.ADVANCED)
        return self.enable_mixed_precision

    @property
    def compile(self) -> bool:
        if self.enable_compile is None:
            return self.optimization_level.includes(OptimizationLevel.ULTRA)
        return self.enable_compile

    @property
    def multi_gpu_bucket_cap_mb(self) -> int:
        return self.multi_gpu_config.bucket_cap_mb

    @property
    def multi_gpu_static_graph(self) -> bool:
        return self.multi_gpu_config.static_graph

    def __setattr__(self, name: str, value: Any) -> None:
        """`multi_gpu_bucket_cap_mb` and `multi_gpu_static_graph` set the fields of multi_gpu_config."""
        field = name.removeprefix("multi_gpu_")
        if name in ("multi_gpu_bucket_cap_mb", "multi_gpu_static_graph"):
            try:
                changed = dataclasses.replace(self.multi_gpu_config, **{field: value})
            except ValidationError as err:
                raise ConfigError(
                    f"PerformanceConfig: `{name}` = {value!r}: {without_fix(err.errors()[0]['msg'])}.",
                    fix="See docs/configuration.md, section parallel.",
                ) from err
            name, value = "multi_gpu_config", changed
        super().__setattr__(name, value)


def _checked(config: MultiGPUConfig) -> MultiGPUConfig:
    """Return `config` with fields that were assigned validated; ValueError for one that only a run reads."""
    config, defaults = dataclasses.replace(config), MultiGPUConfig()
    for name in ONLY_IN_TRAIN:
        if getattr(config, name) != getattr(defaults, name):
            raise ValueError(f"{name} has no effect on your own loop: it is for `pantheraml train`")
    if config.auto_device_map:
        raise ValueError(
            "auto_device_map has no effect on your own loop: use mode=hybrid, hybrid_strategy=model_parallel"
        )
    return config
