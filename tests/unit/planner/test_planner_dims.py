"""ParallelDims from modes and degrees, and unsupported combinations."""

from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.planner.dims import check_together, choose_dims, named_modes
from pantheraml.specs.config_file import validate
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.train import TrainConfig


def config(**sections: Any) -> TrainConfig:
    return validate({"model": {"path": "m"}, "data": {"path": "d", "seq_len": 64}, **sections})


@pytest.mark.seed("S0-112", "S1-027", "S1-065", "S1-094", "S4-037")
@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ({}, 1, ParallelDims()),
        ({}, 4, ParallelDims(replicate=4)),
        ({"shard": 4}, 4, ParallelDims(shard=4)),
        ({"shard": 2}, 4, ParallelDims(replicate=2, shard=2)),
        ({"tensor": 2, "shard": 2}, 8, ParallelDims(replicate=2, shard=2, tensor=2)),
        ({"replicate": 1, "pipeline": 4}, 4, ParallelDims(pipeline=4)),
        ({"mode": "hybrid"}, 4, ParallelDims(replicate=2, pipeline=2)),
        ({"mode": "hybrid"}, 2, ParallelDims(pipeline=2)),
        ({"mode": "hybrid"}, 3, ParallelDims(pipeline=3)),
        ({"mode": "hybrid", "hybrid_strategy": "model_parallel"}, 8, ParallelDims(replicate=4, tensor=2)),
        ({"mode": "hybrid", "hybrid_strategy": "data_parallel"}, 4, ParallelDims(replicate=2, shard=2)),
    ],
)
def test_degrees(parallel: dict[str, Any], world: int, expected: ParallelDims) -> None:
    dims, reason = choose_dims(MultiGPUConfig(**parallel), world)
    assert dims == expected
    assert reason


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        ({"shard": 3}, 4, "shard 3"),
        ({"replicate": 2, "shard": 4}, 4, "= 8"),
        ({"mode": "hybrid"}, 1, "several processes"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(parallel: dict[str, Any], world: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_dims(MultiGPUConfig(**parallel), world)


@pytest.mark.parametrize(
    ("sections", "dims", "message"),
    [
        ({}, ParallelDims(pipeline=2, tensor=2), "combined only with parallel.replicate"),
        (
            {"model": {"path": "m", "precision": "fp8"}, "method": {"kind": "full"}},
            ParallelDims(tensor=2),
            "round its own part",
        ),
        ({}, ParallelDims(replicate=2, shard=2, context=2), "HSDP cannot be combined"),
        ({"parallel": {"aggregation": "median"}}, ParallelDims(shard=2), "aggregation=median"),
        ({"parallel": {"leave_out_nonfinite": True}}, ParallelDims(pipeline=2), "leave_out_nonfinite"),
        ({"parallel": {"batch_shares": "adaptive"}}, ParallelDims(shard=2), "adaptive"),
        ({"parallel": {"batch_shares": [2, 2]}}, ParallelDims(replicate=4), "each of the 4"),
        ({"parallel": {"batch_shares": [0, 2]}}, ParallelDims(replicate=2), "at least 1"),
        (
            {"parallel": {"batch_shares": "3,20"}, "train": {"global_batch_size": 21}},
            ParallelDims(replicate=2),
            "3,20 adds up to 23 sequences, but train.global_batch_size is 21",
        ),
        ({"data": {"path": "d", "seq_len": 66}}, ParallelDims(context=4), "66 tokens"),
        ({"train": {"optimizer": "adamw8bit"}}, ParallelDims(tensor=2), "adamw8bit"),
    ],
)
def test_unsupported_combinations_are_refused(sections: dict[str, Any], dims: ParallelDims, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_together(config(**sections), dims)


def test_supported_combinations_are_accepted() -> None:
    shares = config(parallel={"batch_shares": "2,2,2,15"}, train={"global_batch_size": 21})
    check_together(shares, ParallelDims(replicate=4))
    check_together(config(parallel={"aggregation": "median"}), ParallelDims(replicate=4))
    for dims in named_modes(4).values():
        check_together(config(), dims)


def test_batch_share_of_one_process_is_a_number() -> None:
    with pytest.raises(ConfigError, match=r"List 1 number\(s\), such as 16\."):
        check_together(config(parallel={"batch_shares": "8,8"}, train={"global_batch_size": 16}), ParallelDims())
    check_together(config(parallel={"batch_shares": 16}, train={"global_batch_size": 16}), ParallelDims())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_named_mode_uses_all_processes(world: int) -> None:
    for dims in named_modes(world).values():
        dims.check(world)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "none", "shard": 2}, "parallel.shard is for mode=distributed"),
        ({"aggregation": "weighted"}, "must be set together"),
        ({"aggregation_weights": [1.0, 2.0]}, "must be set together"),
        ({"stages_per_process": 2}, "parallel.pipeline"),
    ],
)
def test_contradicting_parallel_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(parallel=values)


def test_weighted_mean_alias() -> None:
    parsed = MultiGPUConfig(aggregation="weighted_mean", aggregation_weights=[1.0, 2.0])  # type: ignore[arg-type]
    assert parsed.aggregation == "weighted"
