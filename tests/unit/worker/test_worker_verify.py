"""`verify`: what it compares, what it leaves out with a note, and its tolerances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.base.errors import ConfigError
from pantheraml.engine.trial import Trial
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.verify import (
    LOW_PRECISION_FACTOR,
    TOLERANCE,
    check_mode,
    comparable_config,
    differences_to_run,
    measure_tolerances,
)
from tests.harness import make_plan


def config_of(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


TWO = [ParallelDims(replicate=2), ParallelDims(tensor=2)]


@pytest.mark.parametrize(
    ("parallel", "note"),
    [
        ({"aggregation": "median"}, "parallel.aggregation=mean: median does not match a single process by design"),
        ({"aggregation": "weighted", "aggregation_weights": [1, 2]}, "weighted does not match a single process"),
        ({"batch_shares": [1, 1, 2]}, "even batch shares: no mode has 3 data-parallel ranks for batch_shares=1,1,2"),
    ],
)
def test_differences_to_the_run_are_noted(parallel: dict[str, Any], note: str) -> None:
    config = config_of(parallel=parallel)
    (actual,) = differences_to_run(config, TWO)
    assert note in actual
    assert comparable_config(config).parallel.aggregation == "mean"


@pytest.mark.parametrize("parallel", [{}, {"batch_shares": [1, 3]}, {"batch_shares": "adaptive"}])
def test_no_notes_if_compared_as_configured(parallel: dict[str, Any]) -> None:
    config = config_of(parallel=parallel)
    assert not differences_to_run(config, TWO)
    assert comparable_config(config) == config


def test_modes_that_training_refuses_are_not_compared() -> None:
    config = config_of(train={"optimizer": "adamw8bit"}, parallel={"batch_shares": [1, 3], "leave_out_nonfinite": True})
    check_mode(config, ParallelDims(replicate=2))
    check_mode(config, ParallelDims(context=2))
    with pytest.raises(ConfigError, match="adamw8bit quantizes whole tensors"):
        check_mode(config, ParallelDims(shard=2))


def trial_of(loss: float) -> Trial:
    return Trial(losses=[loss], gradient={"a": torch.ones(2)}, weights={"a": torch.ones(2)}, seconds=1.0)


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "default", "sharded"),
    [
        ({}, True, TOLERANCE, TOLERANCE),
        ({"precision": "bf16"}, True, LOW_PRECISION_FACTOR * 0.01, LOW_PRECISION_FACTOR * 0.01),
        (
            {"precision": "bf16", "frozen_weights": "fp8"},
            False,
            LOW_PRECISION_FACTOR * 0.01,
            LOW_PRECISION_FACTOR * 0.01,
        ),
        (
            {"precision": "bf16", "frozen_weights": "fp8"},
            True,
            LOW_PRECISION_FACTOR * 0.01,
            LOW_PRECISION_FACTOR * 0.25,
        ),
        (
            {"precision": "fp32", "frozen_weights": "fp8"},
            True,
            LOW_PRECISION_FACTOR * 0.01,
            LOW_PRECISION_FACTOR * 0.25,
        ),
        ({"precision": "fp32", "frozen_weights": "nf4"}, True, TOLERANCE, TOLERANCE),
    ],
)
def test_tolerances_are_measured_in_low_precision(
    changes: dict[str, Any], tensor_parallel: bool, default: float, sharded: float
) -> None:
    def single_with(**plan_changes: Any) -> Trial:
        (change,) = plan_changes.items()
        return trial_of({("micro_batch_size", 1): 1.01, ("frozen_weights", None): 1.25}[change])

    plan = make_plan(config_of()).model_copy(update=changes)
    tolerances = measure_tolerances(plan, trial_of(1.0), single_with, tensor_parallel=tensor_parallel)
    assert tolerances.of(ParallelDims(replicate=2)) == pytest.approx(default)
    assert tolerances.of(ParallelDims(shard=2, tensor=2)) == pytest.approx(sharded)


def test_tolerances_of_rows_that_are_not_batched_are_measured_against_float32() -> None:
    """One by one is how these rows are taken anyway: compared with itself, nothing would be allowed."""

    def single_with(**plan_changes: Any) -> Trial:
        assert plan_changes == {"precision": "fp32"}
        return trial_of(1.01)

    plan = make_plan(config_of()).model_copy(update={"precision": "bf16"})
    tolerances = measure_tolerances(plan, trial_of(1.0), single_with, tensor_parallel=False, batched=False)
    assert tolerances.default == pytest.approx(LOW_PRECISION_FACTOR * 0.01)
    assert "float32" in tolerances.reason
