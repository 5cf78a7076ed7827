"""MultiGPUConfig: aliases, their meaning, and contradictions."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import all_keys, json_schema, load_config, validate
from pantheraml.specs.legacy_aliases import FIELD_ALIASES, KEYS
from pantheraml.specs.multi_gpu import MultiGPUConfig, MultiGPUMode
from pantheraml.specs.train import ModelConfig, TrainConfig, TrainSettings


def multi_gpu(**values: Any) -> MultiGPUConfig:
    return MultiGPUConfig(**values)


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, **sections})


@pytest.mark.seed("C12", "C27", "S1-026", "S1-031")
@pytest.mark.parametrize(
    ("given", "field", "expected"),
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
def test_aliases_are_translated(given: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(multi_gpu(**given), field) == expected
    assert getattr(config(parallel=given).parallel, field) == expected


@pytest.mark.seed("S0-105", "S1-030", "S3-068")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_hybrid": True, "mode": "distributed"}, "enable_hybrid=True and parallel.mode=distributed"),
        ({"enable_hybrid": False, "mode": "hybrid"}, "enable_hybrid=False and parallel.mode=hybrid"),
        ({"enable_fault_tolerance": False, "max_retries": 3}, "contradict each other"),
        ({"enable_fault_tolerance": True, "max_retries": 0}, "contradict each other"),
        ({"enable_gradient_synchronization": False}, "train different models"),
        ({"timeout_minutes": 5, "timeout_seconds": 30}, "timeout_minutes and parallel.timeout_seconds"),
        ({"sync_batch_norm": True, "sync_bn": False}, "contradict each other"),
        ({"rank": 0}, "rank, local_rank and world_size must be set together"),
        ({"rank": 0, "local_rank": 0}, "must be set together"),
        ({"rank": 2, "local_rank": 0, "world_size": 2}, "parallel.rank=2 is not a rank"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        multi_gpu(**given)
    with pytest.raises(ConfigError, match=message):
        validate({"model": {"path": "m"}, "data": {"path": "d"}, "parallel": given})


def test_an_unknown_field_is_named_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match=r"(?s)no field `aggregaton`\..*fix: Did you mean `aggregation`\?"):
        multi_gpu(aggregaton="mean")
    with pytest.raises(ValueError, match=r"(?s)no field `zzz`\..*fix: Use one of its fields: mode, .*, grace_seconds"):
        multi_gpu(zzz=1)
    with pytest.raises(ConfigError, match=r"(?s)`parallel.aggregaton` is not a known key.*parallel.aggregation"):
        validate({"model": {"path": "m"}, "data": {"path": "d"}, "parallel": {"aggregaton": "mean"}})


def test_every_documented_field_is_a_field() -> None:
    names = {field.name for field in dataclasses.fields(MultiGPUConfig)}  # type: ignore[arg-type]
    assert names >= {"enable_hybrid", "enable_gradient_synchronization", "enable_fault_tolerance"}
    hybrid = multi_gpu(mode="hybrid", max_retries=0)
    assert dataclasses.replace(hybrid, bucket_cap_mb=3).enable_hybrid
    # two names of one setting: a stored config has one of them, so that the other can be overridden
    stored = config(parallel=hybrid).to_dict()["parallel"]
    assert not stored.keys() & {"enable_hybrid", "enable_gradient_synchronization", "enable_fault_tolerance"}
    assert multi_gpu(**{**stored, "mode": "distributed", "max_retries": 2}).enable_fault_tolerance


def test_aliases_can_be_read() -> None:
    assert multi_gpu(mode="hybrid").enable_hybrid
    assert not multi_gpu().enable_hybrid
    assert multi_gpu().enable_fault_tolerance
    assert not multi_gpu(max_retries=0).enable_fault_tolerance


@pytest.mark.seed("C22", "S0-055")
@pytest.mark.parametrize(("alias", "expected"), [(True, "full"), (False, "none"), ("unsloth", "offload")])
def test_use_gradient_checkpointing_alias(alias: bool | str, expected: str) -> None:
    for parallel in ({"use_gradient_checkpointing": alias}, multi_gpu(use_gradient_checkpointing=alias)):
        assert config(parallel=parallel).train.activation_checkpointing == expected
        train = config(parallel=parallel, train=TrainSettings(max_steps=3)).train
        assert (train.activation_checkpointing, train.max_steps) == (expected, 3)
    agreeing = {"activation_checkpointing": expected}
    assert (
        config(parallel={"use_gradient_checkpointing": alias}, train=agreeing).train.activation_checkpointing
        == expected
    )
    with pytest.raises(ValidationError, match="keep one"):
        config(parallel={"use_gradient_checkpointing": alias}, train={"activation_checkpointing": "selective"})
    with pytest.raises(ValidationError, match="keep one"):
        train = TrainSettings(activation_checkpointing="selective")
        config(parallel={"use_gradient_checkpointing": alias}, train=train)


@pytest.mark.seed("S0-054")
def test_auto_device_map_alias() -> None:
    for model in ({"path": "m"}, ModelConfig(path="m"), {"path": "m", "device_map": "auto"}):
        assert config(model=model, parallel={"auto_device_map": True}).model.device_map == "auto"
    assert config(parallel={"auto_device_map": "yes"}).model.device_map == "auto", "as pydantic reads it"
    assert config(parallel={"auto_device_map": False}).model.device_map is None
    with pytest.raises(ValidationError, match=r"auto_device_map means model.device_map=auto, but .* is balanced"):
        config(model={"path": "m", "device_map": "balanced"}, parallel={"auto_device_map": True})


def test_translated_config_round_trip() -> None:
    given = {"auto_device_map": True, "use_gradient_checkpointing": True, "timeout_minutes": 1}
    first = config(parallel=given)
    assert TrainConfig.model_validate(first.to_dict()) == first


@pytest.mark.seed("S1-005", "S1-014", "C27")
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
    parsed = multi_gpu(**given)
    assert parsed.mode == expected
    assert {name: getattr(parsed, name) for name in given} == given


def test_alias_on_the_command_line() -> None:
    required = {("model", "path"): "m", ("data", "path"): "d"}
    parsed = load_config(None, {**required, ("parallel", "enable_hybrid"): True})
    assert parsed.parallel.mode is MultiGPUMode.HYBRID


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        ({"auto_device_map": True}, "parallel.auto_device_map is deprecated: use model.device_map=auto"),
        ({"use_gradient_checkpointing": False}, "deprecated: use train.activation_checkpointing"),
        ({"enable_hybrid": True}, "parallel.enable_hybrid is deprecated: use parallel.mode=hybrid"),
        ({"enable_fault_tolerance": True}, "deprecated: use parallel.max_retries"),
        ({"enable_gradient_synchronization": True}, "deprecated: remove it, gradients"),
        ({"sync_batch_norm": True}, "parallel.sync_batch_norm is deprecated: use parallel.sync_bn"),
        ({"timeout_minutes": 1}, "parallel.timeout_minutes is deprecated: use parallel.timeout_seconds"),
        ({"aggregation": "weighted_mean", "aggregation_weights": [1]}, "use parallel.aggregation=weighted"),
    ],
)
def test_deprecated_names_warn_once(given: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture) -> None:
    stored = config(parallel=given).to_dict()
    assert [warning in message for message in caplog.messages] == [True]
    caplog.clear()
    TrainConfig.model_validate(stored)
    assert not caplog.messages, "aliases are not stored"


def test_fields_of_multi_gpu_config_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    parallel = multi_gpu(auto_device_map=True, use_gradient_checkpointing=True, enable_hybrid=True)
    assert parallel.auto_device_map
    made = config(parallel=parallel)
    assert (made.model.device_map, made.train.activation_checkpointing) == ("auto", "full")
    assert (made.parallel.auto_device_map, made.parallel.use_gradient_checkpointing) == (False, None)
    assert parallel.auto_device_map, "the caller's object is not changed"
    assert not caplog.messages


def test_run_folders_of_earlier_versions_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    config(parallel={"auto_device_map": False, "use_gradient_checkpointing": None})
    assert not caplog.messages


def test_deprecated_names_are_no_keys() -> None:
    known = {".".join(key) for key in all_keys()}
    fields = json_schema()["$defs"]["MultiGPUConfig"]["properties"]
    for name in FIELD_ALIASES:
        assert f"parallel.{name}" in KEYS
        assert f"parallel.{name}" not in known
        assert name not in fields
