"""Configs of the guard and the multi-GPU wrapper for custom training loops (`pantheraml.stability`).

The keys are those of the sections `stability` and `parallel` that make sense where the user's own loop loads, feeds and
saves the model. Other keys and values are refused with a pointer to where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from pantheraml.base.errors import ConfigError
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.section_errors import UNKNOWN, without_fix
from pantheraml.specs.train import (
    BadStepSettings,
    ClippingSettings,
    ConfigSection,
    DebugSettings,
    StabilityConfig,
)
from pantheraml.specs.unknown_field import fields_hint


class OwnLoopConfig(ConfigSection):
    """A section set from Python: invalid fields raise ConfigError instead of pydantic's ValidationError."""

    PAGE: ClassVar[str] = "docs/configuration.md, section stability"
    """Where the fields and their values are documented."""

    def __init__(self, **given: Any) -> None:
        with _config_errors(type(self)):
            super().__init__(**given)

    def __setattr__(self, name: str, value: Any) -> None:
        with _config_errors(type(self)):
            super().__setattr__(name, value)


class GradientClippingConfig(OwnLoopConfig, ClippingSettings):
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Clip gradients to this norm; 0 = no clipping."""


class NaNHandlingConfig(OwnLoopConfig, BadStepSettings):
    @field_validator("on_nonfinite", "on_spike")
    @classmethod
    def _refuse_roll_back(cls, value: str) -> str:
        if value == "roll_back":
            raise ValueError("rolling back needs checkpoints, which only `pantheraml train` writes")
        return value


class PyTorchDebuggingConfig(OwnLoopConfig, DebugSettings):
    pass


CHECKPOINTING = (
    "Recompute the activations of each layer in the backward pass; unsloth: keep their inputs in host memory"
    " (transformers models). Takes effect in the next forward, also if set after the model was wrapped."
)


def one_switch(given: Any) -> Any:
    """Translate `use_multi_gpu`, the other name of `enable_multi_gpu`; a contradiction is an error."""
    if not isinstance(given, dict) or "use_multi_gpu" not in given:
        return given
    values = dict(given)
    used = values.pop("use_multi_gpu")
    if values.setdefault("enable_multi_gpu", used) != used:
        raise ValueError(
            f"use_multi_gpu={used} and enable_multi_gpu={values['enable_multi_gpu']} contradict each other; keep one"
        )
    return values


class PerformanceOptimizationConfig(OwnLoopConfig):
    PAGE = "docs/configuration.md, section parallel"

    enable_multi_gpu: bool = True
    """False: models are not wrapped. `use_multi_gpu` is another name."""
    multi_gpu_mode: Literal["auto", "none", "dataparallel", "distributed", "hybrid"] = "auto"
    """As MultiGPUConfig.mode."""
    multi_gpu_device_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """GPU indices to use, as torch numbers them; None = all."""
    multi_gpu_backend: Literal["nccl", "gloo"] = "nccl"
    """Required communication backend of GPU processes; CPU processes always use gloo."""
    multi_gpu_find_unused_parameters: bool = False
    """DDP: search for parameters without a gradient in each step (slower); needed only if some are unused."""
    multi_gpu_bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """DDP: size of a communication bucket in MiB."""
    multi_gpu_static_graph: bool = True
    """DDP: allow static_graph; used where reentrant checkpointing needs it. Not for gradient accumulation over several
    backward passes."""

    enable_gradient_checkpointing: bool | Literal["unsloth"] = Field(default=False, description=CHECKPOINTING)

    _one_switch = model_validator(mode="before")(one_switch)

    @property
    def checkpointing(self) -> bool | Literal["unsloth"]:
        return self.enable_gradient_checkpointing

    def to_multi_gpu_config(self) -> MultiGPUConfig:
        return MultiGPUConfig(
            mode=MultiGPUMode(self.multi_gpu_mode if self.enable_multi_gpu else "none"),
            device_ids=self.multi_gpu_device_ids,
            backend=self.multi_gpu_backend,
            find_unused_parameters=self.multi_gpu_find_unused_parameters,
            bucket_cap_mb=self.multi_gpu_bucket_cap_mb,
            static_graph=self.multi_gpu_static_graph,
        )


def stability_of(
    clipping: GradientClippingConfig, bad_steps: NaNHandlingConfig, debugging: PyTorchDebuggingConfig
) -> StabilityConfig:
    """Return the equivalent section `stability`."""
    return StabilityConfig(
        **clipping.model_dump(exclude={"max_grad_norm"}), **bad_steps.model_dump(), **debugging.model_dump()
    )


@contextmanager
def _config_errors(section: type[OwnLoopConfig]) -> Iterator[None]:
    try:
        yield
    except ValidationError as err:
        problems, unknown = [], []
        for detail in err.errors():
            name = ".".join(map(str, detail["loc"]))
            if detail["type"] in (*UNKNOWN, "no_such_attribute"):
                problems.append(f"there is no field `{name}`")
                unknown += [name] if len(detail["loc"]) == 1 else []
            else:
                message = without_fix(detail["msg"])
                problems.append(f"`{name}` = {detail['input']!r}: {message}" if name else message)
        fix = f"See {section.PAGE}."
        if unknown:
            hint = fields_hint(unknown, section.model_fields)
            fix = f"{hint} All other settings are for `pantheraml train`: see docs/configuration.md."
        raise ConfigError(f"{section.__name__}: {'; '.join(problems)}.", fix=fix) from err
