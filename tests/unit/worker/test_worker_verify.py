"""What `verify` compares of a config, what it leaves out, and that it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml.base.errors import ConfigError
from pantheraml.engine.trial import Trial
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.verify import NARROW, TOLERANCE, allowed_differences, check_mode, comparable, differences_to_run
from tests.harness import make_plan


def config_of(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


TWO = [ParallelDims(replicate=2), ParallelDims(tensor=2)]


@pytest.mark.parametrize(
    ("parallel", "note"),
    [
        ({"aggregation": "median"}, "parallel.aggregation=mean: median is not meant to equal one process"),
        ({"aggregation": "weighted", "aggregation_weights": [1, 2]}, "weighted is not meant to equal"),
        ({"batch_shares": [1, 1, 2]}, "even shares: no mode has 3 for batch_shares=1,1,2"),
    ],
)
def test_what_is_compared_otherwise_is_said(parallel: dict[str, Any], note: str) -> None:
    config = config_of(parallel=parallel)
    (found,) = differences_to_run(config, TWO)
    assert note in found
    assert comparable(config).parallel.aggregation == "mean"


@pytest.mark.parametrize("parallel", [{}, {"batch_shares": [1, 3]}, {"batch_shares": "adaptive"}])
def test_nothing_is_said_of_what_is_as_in_the_run(parallel: dict[str, Any]) -> None:
    config = config_of(parallel=parallel)
    assert not differences_to_run(config, TWO)
    assert comparable(config) == config


def test_what_training_would_refuse_is_not_compared() -> None:
    config = config_of(train={"optimizer": "adamw8bit"}, parallel={"batch_shares": [1, 3], "leave_out_nonfinite": True})
    check_mode(config, ParallelDims(replicate=2))
    check_mode(config, ParallelDims(context=2))
    with pytest.raises(ConfigError, match="adamw8bit packs whole tensors"):
        check_mode(config, ParallelDims(shard=2))


def trial_of(loss: float) -> Trial:
    return Trial(losses=[loss], gradient={"a": torch.ones(2)}, weights={"a": torch.ones(2)}, seconds=1.0)


@pytest.mark.parametrize(
    ("plan", "cuts_rows", "usual", "cut_rows"),
    [
        ({}, True, TOLERANCE, TOLERANCE),
        ({"precision": "bf16"}, True, NARROW * 0.01, NARROW * 0.01),
        ({"precision": "bf16", "frozen_weights": "fp8"}, False, NARROW * 0.01, NARROW * 0.01),
        ({"precision": "bf16", "frozen_weights": "fp8"}, True, NARROW * 0.01, NARROW * 0.25),
        ({"precision": "fp32", "frozen_weights": "fp8"}, True, NARROW * 0.01, NARROW * 0.25),
        ({"precision": "fp32", "frozen_weights": "nf4"}, True, TOLERANCE, TOLERANCE),
    ],
)
def test_what_is_allowed_is_measured_where_numbers_are_narrow(
    plan: dict[str, Any], cuts_rows: bool, usual: float, cut_rows: float
) -> None:
    def alone_with(**changes: Any) -> Trial:
        (change,) = changes.items()
        return trial_of({("micro_batch_size", 1): 1.01, ("frozen_weights", None): 1.25}[change])

    made = make_plan(config_of()).model_copy(update=plan)
    allowed = allowed_differences(made, trial_of(1.0), alone_with, cuts_rows=cuts_rows)
    assert allowed.of(ParallelDims(replicate=2)) == pytest.approx(usual)
    assert allowed.of(ParallelDims(shard=2, tensor=2)) == pytest.approx(cut_rows)
