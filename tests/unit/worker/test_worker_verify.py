"""What `verify` compares of a config, what it leaves out, and that it says so."""

from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.verify import check_mode, comparable, differences_to_run


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
