"""MultiGPUConfig: the names people know from elsewhere, what they mean here, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import load_config, validate
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.train import ModelConfig, TrainConfig, TrainSettings


def made(**values: Any) -> MultiGPUConfig:
    return MultiGPUConfig(**values)


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


@pytest.mark.parametrize(
    ("given", "field", "meaning"),
    [
        ({"enable_hybrid": True}, "mode", MultiGPUMode.HYBRID),
        ({"enable_hybrid": True, "mode": "hybrid"}, "mode", MultiGPUMode.HYBRID),
        ({"enable_hybrid": False, "mode": MultiGPUMode.DISTRIBUTED}, "mode", MultiGPUMode.DISTRIBUTED),
        ({"enable_fault_tolerance": False}, "max_retries", 0),
        ({"enable_fault_tolerance": True}, "max_retries", 3),
        ({"enable_fault_tolerance": True, "max_retries": 5}, "max_retries", 5),
        ({"enable_gradient_synchronization": True}, "mode", MultiGPUMode.AUTO),
        ({"timeout_minutes": 2}, "timeout_seconds", 120),
        ({"timeout_minutes": 0.5, "timeout_seconds": 30}, "timeout_seconds", 30),
        ({"sync_batch_norm": False}, "sync_bn", False),
        ({"aggregation": "weighted_mean", "aggregation_weights": [1, 2]}, "aggregation", "weighted"),
    ],
)
def test_other_names_mean_the_same(given: dict[str, Any], field: str, meaning: object) -> None:
    assert getattr(made(**given), field) == meaning
    assert getattr(config(parallel=given).parallel, field) == meaning


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_hybrid": True, "mode": "distributed"}, "enable_hybrid=True and parallel.mode=distributed"),
        ({"enable_hybrid": False, "mode": "hybrid"}, "enable_hybrid=False and parallel.mode=hybrid"),
        ({"enable_fault_tolerance": False, "max_retries": 3}, "say different things"),
        ({"enable_fault_tolerance": True, "max_retries": 0}, "say different things"),
        ({"enable_gradient_synchronization": False}, "train different models"),
        ({"timeout_minutes": 5, "timeout_seconds": 30}, "timeout_minutes and parallel.timeout_seconds"),
        ({"sync_batch_norm": True, "sync_bn": False}, "say different things"),
        ({"rank": 0}, "rank, local_rank and world_size go together"),
        ({"rank": 0, "local_rank": 0}, "go together"),
        ({"rank": 2, "local_rank": 0, "world_size": 2}, "parallel.rank=2 is not a rank"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        made(**given)
    with pytest.raises(ConfigError, match=said):
        validate({"model": {"path": "m"}, "data": {"path": "d"}, "parallel": given})


def test_what_is_known_under_both_names_can_be_read_under_both() -> None:
    assert made(mode="hybrid").enable_hybrid
    assert not made().enable_hybrid
    assert made().enable_fault_tolerance
    assert not made(max_retries=0).enable_fault_tolerance


@pytest.mark.parametrize(("said", "meaning"), [(True, "full"), (False, "none"), ("unsloth", "offload")])
def test_gradient_checkpointing_by_its_other_name(said: bool | str, meaning: str) -> None:
    for parallel in ({"use_gradient_checkpointing": said}, made(use_gradient_checkpointing=said)):
        assert config(parallel=parallel).train.activation_checkpointing == meaning
        written = config(parallel=parallel, train=TrainSettings(max_steps=3)).train
        assert (written.activation_checkpointing, written.max_steps) == (meaning, 3)
    agreeing = {"activation_checkpointing": meaning}
    assert (
        config(parallel={"use_gradient_checkpointing": said}, train=agreeing).train.activation_checkpointing == meaning
    )
    with pytest.raises(ValidationError, match="keep one"):
        config(parallel={"use_gradient_checkpointing": said}, train={"activation_checkpointing": "selective"})
    with pytest.raises(ValidationError, match="keep one"):
        train = TrainSettings(activation_checkpointing="selective")
        config(parallel={"use_gradient_checkpointing": said}, train=train)


def test_automatic_device_map() -> None:
    for model in ({"path": "m"}, ModelConfig(path="m"), {"path": "m", "device_map": "auto"}):
        assert config(model=model, parallel={"auto_device_map": True}).model.device_map == "auto"
    assert config(parallel={"auto_device_map": False}).model.device_map is None
    with pytest.raises(ValidationError, match=r"auto_device_map means model.device_map=auto, but .* is balanced"):
        config(model={"path": "m", "device_map": "balanced"}, parallel={"auto_device_map": True})


def test_a_translated_configuration_can_be_written_and_read_again() -> None:
    given = {"auto_device_map": True, "use_gradient_checkpointing": True, "timeout_minutes": 1}
    first = config(parallel=given)
    assert TrainConfig.model_validate(first.to_dict()) == first


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mode": MultiGPUMode.DATAPARALLEL, "device_ids": [0, 1, 2, 3], "output_device": 0}, "dataparallel"),
        (
            {"mode": "distributed", "backend": "nccl", "world_size": 4, "rank": 0, "local_rank": 0}
            | {"find_unused_parameters": False, "bucket_cap_mb": 25, "static_graph": True},
            "distributed",
        ),
        ({"mode": "hybrid", "enable_hybrid": True, "hybrid_strategy": "pipeline", "backend": "nccl"}, "hybrid"),
        ({"mode": MultiGPUMode.AUTO}, "auto"),
        ({"backend": "nccl", "auto_device_map": True}, "auto"),
    ],
)
def test_documented_configurations(given: dict[str, Any], expected: str) -> None:
    found = made(**given)
    assert found.mode == expected
    assert {name: getattr(found, name) for name in given} == given


def test_on_the_command_line() -> None:
    needed = {("model", "path"): "m", ("data", "path"): "d"}
    found = load_config(None, {**needed, ("parallel", "enable_hybrid"): True})
    assert found.parallel.mode is MultiGPUMode.HYBRID
    with pytest.raises(ConfigError, match=r"Did you mean `parallel.auto_device_map`"):
        load_config(None, {**needed, ("parallel", "auto_device_mapp"): True})
