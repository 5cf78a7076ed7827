"""Contradictions and impossible requests of multi-GPU scripts: each is an error that names the way out, and nothing
is half applied. `num_gpus`, unsupported versions and a process group that exists: tests/unit/hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pantheraml
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.hooks import multi_gpu
from pantheraml.performance import PerformanceConfig, create_performance_optimizer
from pantheraml.specs.multi_gpu import MultiGPUConfig
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.stability import PerformanceOptimizationConfig
from tests.unit.models.conftest import TinyModel

CONTRADICTION = {"use_multi_gpu": True, "enable_multi_gpu": False}


@pytest.mark.seed("C6", "S0-105")
@pytest.mark.parametrize(
    "call",
    [
        lambda: pantheraml.FastLanguageModel.from_pretrained("no-such-model", **CONTRADICTION),
        lambda: PerformanceConfig(**CONTRADICTION),
        lambda: PerformanceOptimizationConfig(**CONTRADICTION),
    ],
    ids=["from_pretrained", "PerformanceConfig", "PerformanceOptimizationConfig"],
)
def test_two_switches_that_disagree(call: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"use_multi_gpu.*enable_multi_gpu|enable_multi_gpu.*use_multi_gpu"):
        call()
    assert multi_gpu.current() is None


@pytest.mark.seed("C5", "S0-105")
@pytest.mark.parametrize("device_map", [{"model": 0, "lm_head": 1}, {"": "cuda:1"}, "cuda:1"])
def test_a_split_model_under_torchrun(tiny_model: TinyModel, device_map: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="the one device of this rank") as caught:
        pantheraml.FastLanguageModel.from_pretrained(str(tiny_model("llama")), device_map=device_map)
    assert caught.value.fix == "Remove device_map, or run a single process."


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(GPU(index=i, name="GPU", total_bytes=1, free_bytes=1, compute_capability=None) for i in range(2))
    found = DeviceSpec(gpus=gpus, cpu_count=1, ram_bytes=1, driver="1")
    monkeypatch.setattr("pantheraml.multigpu.probe", lambda: found)


@pytest.mark.seed("S3-015", "S3-025")
def test_more_gpus_than_there_are(two_gpus: None) -> None:
    model = nn.Linear(2, 1)
    trainer = pantheraml.MultiGPUTrainer(model, 4, optimizer_config={"class": torch.optim.SGD, "kwargs": {"lr": 0.1}})
    with pytest.raises(DeviceError, match=r"4 processes were requested, but 2 GPU\(s\) are visible") as caught:
        trainer.setup()
    assert caught.value.fix == "Request 2 or fewer."
    assert trainer.optimizer is None
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_4_bit_on_a_cpu(tiny_model: TinyModel) -> None:
    """It works here, where other libraries need a GPU; what cannot work is an error, before anything is loaded."""
    model, _ = pantheraml.FastLanguageModel.from_pretrained(
        str(tiny_model("llama")), device_map="cpu", load_in_4bit=True
    )
    adapted = pantheraml.FastLanguageModel.get_peft_model(model, r=2).train()
    ids = torch.arange(12).view(2, 6)
    adapted(input_ids=ids, labels=ids).loss.backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in adapted.parameters())
    with pytest.raises(ConfigError, match="nf4 weights cannot be trained") as caught:
        pantheraml.FastLanguageModel.from_pretrained(
            "no-such-model", device_map="cpu", load_in_4bit=True, full_finetuning=True
        )
    assert caught.value.fix


@pytest.mark.seed("S3-024")
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kwargs": {"lr": 1e-3}}, "optimizer_config has no 'class'"),
        (torch.optim.SGD, "optimizer_config has no 'class'"),
        ({"class": "AdamW"}, "is not an optimizer class"),
        ({"class": torch.optim.SGD, "lr": 1e-3}, "has no entry 'lr'"),
        ({"class": torch.optim.SGD, "kwargs": 1e-3}, "is a float, not a dict"),
    ],
)
def test_an_optimizer_config_without_a_class(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pantheraml.MultiGPUTrainer(nn.Linear(2, 1), optimizer_config=config)
    assert caught.value.fix == "Pass {'class': torch.optim.AdamW, 'kwargs': {'lr': 2e-5}}."


@pytest.mark.seed("S1-119")
def test_a_mode_that_is_not_available_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = create_performance_optimizer(PerformanceConfig(multi_gpu_config=MultiGPUConfig(mode="dataparallel")))  # type: ignore[arg-type]
    optimizer.config.enable_gradient_checkpointing = True
    with pytest.raises(DeviceError, match="at least two GPUs") as caught:
        optimizer.wrap_model_for_multi_gpu(model)
    assert caught.value.fix == "Use the mode none or auto."
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]
    assert not model._forward_pre_hooks
    optimizer.cleanup()
