"""Bodies of the endpoints under `/multigpu`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

TrainingType = Literal["auto", "distributed", "dataparallel"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class DatasetConfig(_Body):
    texts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    max_length: Annotated[int, Field(ge=8, le=1 << 20)] = 512
    """Tokens of a text; what is longer is cut off."""


class TrainingConfig(_Body):
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 3
    learning_rate: Annotated[float, Field(gt=0, le=10)] = 5e-5
    batch_size_per_gpu: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    world_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """GPUs, or CPU processes where there are none; None: all GPUs or, without any, one process (two if distributed)."""


class TrainingRequest(_Body):
    model_name: Annotated[str, Field(max_length=512)]
    dataset_config: DatasetConfig
    training_config: TrainingConfig = TrainingConfig()
    user_id: int | str | None = None
    """Must be the user of the API key, if there is one."""
    training_type: TrainingType | None = None
    """Must be that of the path."""
