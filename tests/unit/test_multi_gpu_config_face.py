"""ConfigManager and DeviceManager: settings for enable_multi_gpu that fit, templates, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pantheraml
from pantheraml.base.errors import ConfigError, OutOfMemoryError
from pantheraml.devices.probe import probe
from pantheraml.hooks import multi_gpu
from pantheraml.multi_gpu_config import TEMPLATES, ConfigManager, DeviceManager
from pantheraml.planner.known_models import known_config


@pytest.mark.seed("S3-030", "S3-031", "S3-052")
def test_devices_are_those_of_the_probe() -> None:
    assert DeviceManager().get_available_devices() == list(probe().gpus)


@pytest.mark.seed("S3-033", "S3-066", "S3-067")
def test_larger_models_get_smaller_batches() -> None:
    sizes = [
        ConfigManager().get_optimal_config(model_size=model, available_memory=memory)["batch_size_per_gpu"]
        for model, memory in (("1B", "32GB"), ("7B", "32GB"), ("7B", "16GB"), ("7B", 80e9))
    ]
    one, seven, half, big = sizes
    assert one > seven > half >= 1
    assert big > seven
    assert all(size & (size - 1) == 0 for size in sizes)
    with pytest.raises(OutOfMemoryError, match="A model of 70B parameters needs about") as caught:
        ConfigManager().get_optimal_config(model_size="70B", available_memory="32GB")
    assert "parallel.shard" in str(caught.value.fix)


def test_the_planner_decides_for_models_that_are_known(tmp_path: Path) -> None:
    def batch(model: str, memory: str, **changes: Any) -> int:
        found = ConfigManager().get_optimal_config(model_size=model, available_memory=memory, **changes)
        return int(found["batch_size_per_gpu"])

    assert batch("meta-llama/Llama-3.1-8B", "80GB") > batch("meta-llama/Llama-3.1-8B", "24GB") >= 1
    assert batch("Llama-3.2-1B", "24GB") > batch("Llama-3.1-8B", "24GB")
    assert batch("Llama-3.1-8B", "24GB") > batch("Llama-3.1-8B", "24GB", max_seq_length=8192)
    (tmp_path / "config.json").write_text(json.dumps(known_config("llama-3.1-8b")))
    assert batch(str(tmp_path), "24GB") == batch("Llama-3.1-8B", "24GB")
    with pytest.raises(OutOfMemoryError, match="predicted to need") as caught:
        batch("Llama-3.1-8B", "16GB", load_in_4bit=False)
    assert "4 bits" in str(caught.value.fix)


@pytest.mark.seed("S3-034", "S3-069")
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_arguments_of_enable_multi_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANTHERAML_RELAUNCH", "0")
    template = ConfigManager().get_template(name)
    ConfigManager().validate(template)
    try:
        pantheraml.enable_multi_gpu(**template)
        current = multi_gpu.current()
        assert current is not None
        assert current.gradient_aggregation == template["gradient_aggregation"]
    finally:
        pantheraml.disable_multi_gpu()
    assert multi_gpu.current() is None


@pytest.mark.seed("S3-068")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_gpu": 4}, "enable_multi_gpu has no argument 'num_gpu'"),
        ({"num_gpus": 0}, "num_gpus=0 is not a positive integer"),
        ({"batch_size_per_gpu": -1}, "batch_size_per_gpu=-1 is not a positive integer"),
        ({"gradient_aggregation": "most"}, "Unknown gradient aggregation `most`"),
        ({"num_gpus": 1, "gradient_aggregation": "trimmed_mean"}, "leaves none of 1 rank"),
    ],
)
def test_validation(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConfigManager().validate(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_size": "big"}, "model_size='big' is not a number of parameters"),
        ({"model_size": "7B", "available_memory": "much"}, "available_memory='much' is not a size"),
        ({"model_size": "7B", "available_memory": "32GB", "max_seq_length": 0}, "max_seq_length=0"),
    ],
)
def test_bad_sizes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ConfigManager().get_optimal_config(**arguments)
    with pytest.raises(ConfigError, match="There is no template 'fast'") as caught:
        ConfigManager().get_template("fast")
    assert "default, low_memory, robust" in str(caught.value.fix)
