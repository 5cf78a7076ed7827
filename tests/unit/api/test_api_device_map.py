"""`device_map` and `max_memory` of FastLanguageModel, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pantheraml import FastLanguageModel
from pantheraml.base.errors import ConfigError
from tests.unit.models.conftest import TinyModel


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a host without GPUs")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PANTHERAML_ENABLE_MULTIGPU"):
        monkeypatch.delenv(name, raising=False)


def loaded(tiny_model: TinyModel, **arguments: Any) -> Any:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model("llama")), **arguments)
    return model


MAPS = [None, "auto", "balanced", "sequential", "cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}]


@pytest.mark.seed("S0-032", "S2-011")
@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("multi_gpu", [False, True])
def test_without_gpus_every_map_is_the_cpu(tiny_model: TinyModel, device_map: Any, multi_gpu: bool) -> None:
    model = loaded(tiny_model, device_map=device_map, enable_multi_gpu=multi_gpu)
    adapted = FastLanguageModel.get_peft_model(model, r=2)
    ids = torch.arange(12).view(2, 6)
    loss = adapted.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    assert {parameter.device.type for parameter in adapted.parameters()} == {"cpu"}
    plain = loaded(tiny_model).train()
    assert torch.equal(loss, plain(input_ids=ids, labels=ids).loss), "a fresh adapter does nothing"


@pytest.mark.parametrize("device_map", MAPS)
def test_a_rank_has_its_own_device(tiny_model: TinyModel, device_map: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    model = loaded(tiny_model, device_map=device_map)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with pytest.raises(ConfigError, match="max_memory"):
        loaded(tiny_model, device_map="auto", max_memory={"cpu": "1GB"})


def test_max_memory_within_limits(tiny_model: TinyModel) -> None:
    model = loaded(tiny_model, device_map="auto", max_memory={"cpu": "1GB"})
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.seed("S0-064")
def test_auto_device_map_alias(tiny_model: TinyModel) -> None:
    model = loaded(tiny_model, auto_device_map=True, use_multi_gpu=True, max_memory={"cpu": "1GB"})
    assert next(model.parameters()).device.type == "cpu"
    with pytest.raises(ConfigError, match=r"auto_device_map means .* device_map is 'balanced'"):
        loaded(tiny_model, auto_device_map=True, device_map="balanced")
