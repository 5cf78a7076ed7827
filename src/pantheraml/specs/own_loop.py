"""What people's own training loops can tell the guard and the wrapping of models (`pantheraml.stability`).

The keys are those of the sections `stability` and `parallel`, as far as they make sense where somebody else loads the
model, feeds it and saves it. A key or a value that does not is refused, with where it is instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from pantheraml.base.errors import ConfigError
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.train import (
    BadStepSettings,
    ClippingSettings,
    DebugSettings,
    Section,
    StabilityConfig,
)


class OwnLoopSection(Section):
    """A section that is written in Python alone: what is wrong with it is a ConfigError at once."""

    def __init__(self, **given: Any) -> None:
        with _refusing(type(self)):
            super().__init__(**given)

    def __setattr__(self, name: str, value: Any) -> None:
        with _refusing(type(self)):
            super().__setattr__(name, value)


class GradientClippingConfig(OwnLoopSection, ClippingSettings):
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0 = no clipping."""


class NaNHandlingConfig(OwnLoopSection, BadStepSettings):
    @field_validator("on_nonfinite", "on_spike")
    @classmethod
    def _refuse_rolling_back(cls, value: str) -> str:
        if value == "roll_back":
            raise ValueError("that needs checkpoints of the run, which `pantheraml train` has")
        return value


class PyTorchDebuggingConfig(OwnLoopSection, DebugSettings):
    pass


class PerformanceOptimizationConfig(OwnLoopSection):
    enable_multi_gpu: bool = True
    """False: models stay as they are."""
    multi_gpu_mode: Literal["auto", "none", "dataparallel", "distributed", "hybrid"] = "auto"
    """auto: distributed among processes that have met; dataparallel: copies on the GPUs of one process."""
    multi_gpu_device_ids: list[Annotated[int, Field(ge=0)]] | None = None
    """GPUs that may be used, as torch numbers them; None = all."""
    multi_gpu_backend: Literal["nccl", "gloo"] = "nccl"
    """What processes with GPUs must talk through; those on CPUs always use gloo."""
    multi_gpu_find_unused_parameters: bool = False
    """DDP looks for parameters that a step did not use (slower); needed only when some are skipped."""
    multi_gpu_bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """Size of a DDP communication bucket in MiB."""
    multi_gpu_static_graph: bool = True
    """Allow DDP's static graph; it is used where reentrant checkpointing needs it. Not for steps of several backward
    passes."""

    @field_validator("multi_gpu_mode")
    @classmethod
    def _refuse_dividing(cls, value: str) -> str:
        if value == "hybrid":
            raise ValueError("that divides the model itself, which `pantheraml train` does (parallel.mode: hybrid)")
        return value

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
    """The section `stability` that says the same."""
    return StabilityConfig(
        **clipping.model_dump(exclude={"max_grad_norm"}), **bad_steps.model_dump(), **debugging.model_dump()
    )


@contextmanager
def _refusing(section: type[Section]) -> Iterator[None]:
    try:
        yield
    except ValidationError as err:
        problems = []
        for detail in err.errors():
            name = ".".join(map(str, detail["loc"]))
            if detail["type"] in ("extra_forbidden", "no_such_attribute"):
                problems.append(f"there is no field `{name}`")
            else:
                message = detail["msg"].removeprefix("Value error, ")
                problems.append(f"`{name}` = {detail['input']!r}: {message}" if name else message)
        raise ConfigError(
            f"{section.__name__}: {'; '.join(problems)}.",
            todo=f"Its fields are {', '.join(section.model_fields)}. Everything else that a run can be told is for"
            " `pantheraml train`: see docs/configuration.md.",
        ) from err
