"""One process with several devices, planned for hypothetical hardware."""

from __future__ import annotations

from typing import Any

import pytest

from pantheraml.base.errors import ConfigError, DeviceError, PantheraError
from pantheraml.planner.choose import choose
from pantheraml.specs.plan import GPU, DeviceSpec, LayerSplit, Plan
from pantheraml.specs.train import TrainConfig


def machine(gpus: int = 0) -> DeviceSpec:
    found = [
        GPU(index=i, name="Test GPU", total_bytes=80 << 30, free_bytes=79 << 30, compute_capability=(9, 0))
        for i in range(gpus)
    ]
    return DeviceSpec(gpus=tuple(found), cpu_count=8, ram_bytes=1 << 36, driver=None)


def plan_for(gpus: int, *, model: dict[str, Any] | None = None, **sections: Any) -> Plan:
    values = {"model": {"path": "m", **(model or {})}, "data": {"path": "d"}, **sections}
    return choose(TrainConfig.model_validate(values), machine(gpus))


COPIES = {"mode": "dataparallel"}


@pytest.mark.seed("S1-001")
def test_dataparallel_is_one_process_with_all_gpus() -> None:
    plan = plan_for(4, parallel=COPIES, train={"global_batch_size": 36})
    assert (plan.world_size, plan.device_ids, plan.copies, plan.split) == (1, (0, 1, 2, 3), True, None)
    assert plan.micro_batch_size == 4 * 5, "9 sequences per GPU, at most 8 per micro-batch: 2 of 5"
    explicit = plan_for(4, parallel=COPIES, train={"global_batch_size": 36, "micro_batch_size": 3})
    assert explicit.micro_batch_size == 12


def test_dataparallel_disables_single_device_optimizations() -> None:
    plan = plan_for(2, parallel=COPIES)
    assert (plan.fused, plan.cuda_graph, plan.compile) == (False, False, False)
    for name in ("train.fused", "train.cuda_graph", "train.compile"):
        assert "DataParallel" in plan.reason(name)


@pytest.mark.seed("S1-016")
def test_output_device_comes_first() -> None:
    plan = plan_for(4, parallel={**COPIES, "device_ids": [0, 1, 3], "output_device": 3})
    assert plan.device_ids == (3, 0, 1)
    assert plan_for(4, parallel={**COPIES, "output_device": 0}).device_ids == (0, 1, 2, 3)


def test_dataparallel_uses_at_most_one_gpu_per_sequence() -> None:
    assert plan_for(4, parallel=COPIES, train={"global_batch_size": 3}).device_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("gpus", "sections", "error", "message"),
    [
        (0, {}, DeviceError, "two GPUs, but the run has 0"),
        (1, {}, DeviceError, "two GPUs, but the run has 1"),
        (4, {"device": "cpu"}, DeviceError, "two GPUs, but the run has 0"),
        (4, {"parallel": {**COPIES, "device_ids": [2]}}, DeviceError, "two GPUs, but the run has 1"),
        (4, {"parallel": {**COPIES, "world_size": 2}}, ConfigError, "mode=dataparallel runs one process"),
        (2, {"parallel": {**COPIES, "output_device": 2}}, DeviceError, r"output_device=2.*\[0, 1\]"),
        (2, {"train": {"global_batch_size": 1}}, ConfigError, "one sequence"),
        (2, {"train": {"global_batch_size": 4, "micro_batch_size": 3}}, ConfigError, "more than one GPU gets"),
        (2, {"method": {"kind": "qlora"}}, ConfigError, "quantized to nf4"),
        (2, {"model": {"precision": "fp8"}}, ConfigError, "quantized to fp8"),
        (2, {"train": {"activation_checkpointing": "offload"}}, ConfigError, "offload"),
        (2, {"train": {"compile": "on"}}, ConfigError, "compile"),
        (2, {"train": {"fused": "on"}}, DeviceError, "fused=on is not possible here: DataParallel"),
        (2, {"train": {"cuda_graph": "on"}}, ConfigError, "cuda_graph=on is not possible: DataParallel"),
    ],
)
def test_unsupported_dataparallel_settings_are_refused(
    gpus: int, sections: Any, error: type[PantheraError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_for(gpus, **{"parallel": COPIES, **sections})


def split(device_map: Any, max_memory: Any = None) -> LayerSplit:
    return LayerSplit(device_map=device_map, max_memory=max_memory)


def test_model_is_not_split_by_default() -> None:
    plan = plan_for(4)
    assert (plan.world_size, plan.split, plan.copies) == (4, None, False)


@pytest.mark.seed("S0-033", "S2-035")
@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
def test_strategy_splits_one_process_over_all_gpus(strategy: str) -> None:
    plan = plan_for(3, model={"device_map": strategy, "max_memory": {0: "10GiB", 2: 5}})
    assert (plan.world_size, plan.device_ids) == (1, (0, 1, 2))
    assert plan.split == split(strategy, {"cuda:0": "10GiB", "cuda:2": 5})
    assert (plan.fused, plan.cuda_graph, plan.compile) == (False, False, False)
    for name in ("train.fused", "train.cuda_graph", "train.compile"):
        assert plan.reason(name) == "layers are on several devices"


@pytest.mark.parametrize("strategy", ["auto", "balanced", "sequential"])
@pytest.mark.parametrize(("gpus", "parallel"), [(4, {"mode": "none"}), (1, {}), (0, {}), (4, {"device_ids": [3]})])
def test_strategy_on_one_device_uses_that_device(strategy: str, gpus: int, parallel: Any) -> None:
    plan = plan_for(gpus, model={"device_map": strategy}, parallel=parallel)
    assert (plan.world_size, plan.split) == (1, None)
    assert plan.device_ids == (() if gpus == 0 else tuple(parallel.get("device_ids", [0])))
    assert plan.fused == (gpus > 0), "single-device optimizations stay on"


def test_device_map_of_one_gpu_uses_only_that_gpu() -> None:
    plan = plan_for(4, model={"device_map": "cuda:2"})
    assert (plan.device_ids, plan.split, plan.fused) == ((2,), None, True)
    limited = plan_for(4, model={"device_map": 2, "max_memory": {2: "1GB"}})
    assert (limited.device_ids, limited.split) == ((2,), split({"": "cuda:0"}, {"cuda:0": "1GB"}))


def test_device_map_indices_count_the_gpus_of_the_run() -> None:
    custom = {"model.embed_tokens": "cpu", "model": 2, "lm_head": 1}
    plan = plan_for(4, model={"device_map": custom, "max_memory": {1: 7}}, parallel={"device_ids": [3, 2, 0]})
    assert plan.device_ids == (0, 2), "the GPUs that the map names, in its order"
    expected = {"model.embed_tokens": "cpu", "model": "cuda:0", "lm_head": "cuda:1"}
    assert plan.split == split(expected, {"cuda:1": 7})
    assert plan.reason("train.fused") == "layers are on several devices"


def test_explicit_map_works_with_mode_none() -> None:
    plan = plan_for(4, model={"device_map": {"": 0, "lm_head": 1}}, parallel={"mode": "none"})
    assert (plan.device_ids, plan.split) == ((0, 1), split({"": "cuda:0", "lm_head": "cuda:1"}))


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_cpu_only_map_runs_on_the_cpu(device_map: Any) -> None:
    plan = plan_for(2, model={"device_map": device_map})
    assert (plan.device, plan.world_size, plan.device_ids) == ("cpu", 1, ())
    has_modules = isinstance(device_map, dict) and len(device_map) > 1
    assert plan.split == (split(device_map) if has_modules else None), "module names are checked later"
    with pytest.raises(ConfigError, match="device is cuda"):
        plan_for(2, model={"device_map": device_map}, device="cuda")


@pytest.mark.parametrize(
    "parallel", [{"world_size": 2}, {"mode": "distributed"}, {"shard": 2}, {"mode": "hybrid"}, {"tensor": 2}]
)
def test_each_of_several_processes_has_its_own_device(parallel: Any) -> None:
    for strategy in ("auto", "sequential", "cuda"):
        plan = plan_for(2, model={"device_map": strategy}, parallel=parallel)
        assert (plan.world_size, plan.split) == (2, None)
        assert plan.reason("model.device_map") == "each process has its own device"
    for device_map in ("cuda:0", {"": 1}, {"": 0, "lm_head": 1}):
        with pytest.raises(ConfigError, match="several processes"):
            plan_for(2, model={"device_map": device_map}, parallel=parallel)
    with pytest.raises(ConfigError, match="max_memory is for one process"):
        plan_for(2, model={"device_map": "auto", "max_memory": {0: "1GB"}}, parallel=parallel)


@pytest.mark.parametrize(
    ("gpus", "model", "sections", "error", "message"),
    [
        (2, {"device_map": "cuda:2"}, {}, DeviceError, "cuda:2.*cuda:0, cuda:1"),
        (0, {"device_map": {"": 0}}, {}, DeviceError, "cuda:0.*none"),
        (2, {"device_map": {"": 0}}, {"device": "cpu"}, DeviceError, "cuda:0.*none"),
        (2, {"device_map": "auto", "max_memory": {3: "1GB"}}, {}, DeviceError, "max_memory names cuda:3"),
        (2, {"device_map": "auto"}, {"train": {"activation_checkpointing": "offload"}}, ConfigError, "offload"),
        (2, {"device_map": "auto"}, {"train": {"compile": "on"}}, ConfigError, r"train\.compile=on"),
        (2, {"device_map": "auto"}, {"train": {"fused": "on"}}, DeviceError, "several devices"),
        (2, {"device_map": "auto"}, {"train": {"cuda_graph": "on"}}, ConfigError, "several devices"),
    ],
)
def test_unsupported_split_settings_are_refused(
    gpus: int, model: Any, sections: Any, error: type[PantheraError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_for(gpus, model=model, **sections)


def test_quantized_model_can_be_split() -> None:
    plan = plan_for(2, model={"device_map": "auto"}, method={"kind": "qlora"})
    assert (plan.frozen_weights, plan.fused) == ("nf4", False)
