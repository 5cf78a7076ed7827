"""Accepted and stored forms of `model.device_map` and `model.max_memory`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.specs.config_file import dump_yaml, load_config, validate
from pantheraml.specs.resume import check_resumable
from pantheraml.specs.train import TrainConfig


def config(model: dict[str, Any], **sections: Any) -> TrainConfig:
    return validate({"model": {"path": "m", **model}, "data": {"path": "d"}, **sections})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "auto"),
        ("balanced", "balanced"),
        ("sequential", "sequential"),
        (1, "cuda:1"),
        ("1", "cuda:1"),
        ("cuda", "cuda"),
        ("cpu", "cpu"),
        ({"": 0, "lm_head": "cpu"}, {"": "cuda:0", "lm_head": "cpu"}),
    ],
)
def test_device_map_round_trip(given: Any, expected: Any, tmp_path: Path) -> None:
    parsed = config({"device_map": given, "max_memory": {0: "10GiB", "cpu": 5, "cuda:1": "1.5 MB"}})
    assert parsed.model.device_map == expected
    assert parsed.model.max_memory == {"cuda:0": "10GiB", "cpu": 5, "cuda:1": "1.5 MB"}
    (tmp_path / "config.yaml").write_text(dump_yaml(parsed))
    assert load_config(tmp_path / "config.yaml") == parsed
    assert TrainConfig.model_validate_json(parsed.model_dump_json()) == parsed


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"device_map": "fastest"}, "use auto, balanced, sequential, cuda:N, cpu, or a mapping"),
        ({"device_map": {"": "disk"}}, "use auto, balanced"),
        ({"device_map": True}, "use auto, balanced"),
        ({"device_map": -1}, "use auto, balanced"),
        ({"device_map": "auto", "max_memory": {0: "ten"}}, "max_memory"),
        ({"device_map": "auto", "max_memory": {"disk": 10}}, "max_memory"),
        ({"max_memory": {0: "10GiB"}}, r"needs model\.device_map"),
    ],
)
def test_invalid_device_map_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(model)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"mode": "dataparallel", "aggregation": "median"}, "aggregation needs several processes"),
        ({"mode": "dataparallel", "batch_shares": "adaptive"}, "batch_shares needs several processes"),
        ({"mode": "dataparallel", "leave_out_nonfinite": True}, "leave_out_nonfinite needs several processes"),
        ({"output_device": 0}, "output_device is for mode=dataparallel"),
    ],
)
def test_settings_that_dataparallel_does_not_support(parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config({}, parallel=parallel)


def test_dataparallel_and_device_map_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="keep one"):
        config({"device_map": "auto"}, parallel={"mode": "dataparallel"})


def test_device_map_may_change_on_resume() -> None:
    check_resumable(config({}), config({"device_map": {"": 0, "lm_head": 1}, "max_memory": {0: "1GB"}}))
    check_resumable(config({"device_map": "auto"}), config({}, parallel={"mode": "dataparallel"}))
