"""Bodies of the endpoints under `/multigpu`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

TrainingType = Literal["auto", "distributed", "dataparallel"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DatasetConfig(_Body):
    texts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    max_length: Annotated[int, Field(ge=8, le=1 << 20)] = 512
    """Tokens of a text; longer ones are truncated."""


class TrainingConfig(_Body):
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 3
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 5e-5
    batch_size_per_gpu: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    world_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """GPUs, or CPU processes where there are none; None: all GPUs or, without any, one process (two if distributed)."""


class ResourceRequest(_Body):
    action: Literal["disable", "enable"]
    """disable: these devices are not given to new jobs; running ones continue."""
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    devices: list[Annotated[str, Field(max_length=64)]] = []
    """Devices by their names in `resources/status`, which CPU slots have as well."""
    reason: Annotated[str, Field(max_length=500)] | None = None

    @model_validator(mode="after")
    def _some(self) -> ResourceRequest:
        if not self.gpu_ids and not self.devices:
            raise ValueError("name some gpu_ids or devices")
        if "\0" in (self.reason or ""):
            raise ValueError("null characters cannot be stored")
        return self

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*(f"gpu:{index}" for index in self.gpu_ids), *self.devices]))


class DeviceTest(_Body):
    gpu_ids: list[Annotated[int, Field(ge=0)]] = []
    """GPUs to test, all at once; empty: as many as `processes` says."""
    processes: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Ranks; None: one per GPU named, else one."""


class TrainingRequest(_Body):
    model_name: Annotated[str, Field(max_length=512)]
    dataset_config: DatasetConfig
    training_config: TrainingConfig = TrainingConfig()
    user_id: int | str | None = None
    """Must be the user of the API key, if there is one."""
    training_type: TrainingType | None = None
    """Must be that of the path."""
