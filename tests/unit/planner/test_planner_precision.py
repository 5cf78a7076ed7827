"""One rule for number formats: what the planner and the loader both ask."""

from __future__ import annotations

import pytest
import torch

from pantheraml.api.loading_options import chosen_dtype, default_fp8
from pantheraml.base.errors import ConfigError, DeviceError
from pantheraml.planner.choose import choose
from pantheraml.planner.precision import TORCH_NAMES, choose_fp8, choose_precision, parse_precision
from pantheraml.specs.plan import GPU, DeviceSpec, Plan
from pantheraml.specs.train import TrainConfig

SETTINGS = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


def plan_for(capability: tuple[int, int] | None) -> Plan:
    gpu = GPU(index=0, name="G", total_bytes=80 << 30, free_bytes=80 << 30, compute_capability=capability)
    spec = DeviceSpec(gpus=(gpu,) if capability else (), cpu_count=4, ram_bytes=1 << 34, driver="1")
    return choose(TrainConfig.model_validate(SETTINGS), spec)


@pytest.mark.seed("C15", "S0-004", "S0-070", "S0-103")
@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0)])
def test_a_script_and_a_config_get_the_same(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    device = torch.device("cpu" if capability is None else "cuda")
    plan = plan_for(capability)
    assert chosen_dtype(None, False, device) is getattr(torch, TORCH_NAMES[plan.precision])
    assert default_fp8(device, split=False) == plan.frozen_weights
    assert plan.frozen_weights == ("fp8" if capability == (9, 0) else None)


@pytest.mark.seed("C15", "S3-019")
@pytest.mark.parametrize("given", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_names_and_dtypes(given: object) -> None:
    assert parse_precision(given) == "bf16"
    assert chosen_dtype(given, False, torch.device("cpu")) is torch.bfloat16  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["int4", torch.int8, 16, "", True])
def test_what_is_no_precision(given: object) -> None:
    with pytest.raises(ConfigError, match="is not one of float32, bfloat16, float16, auto"):
        parse_precision(given)


def test_the_weakest_gpu_decides() -> None:
    assert choose_precision(None, "cuda", [(9, 0), (7, 0)]).value == "fp16"
    assert choose_precision(None, "cuda", [(9, 0), None]).value == "fp32"
    assert choose_fp8([(9, 0), (8, 9)]) == (False, "fp8 needs compute capability 9.0 or newer, and one has 8.9")
    assert choose_fp8([(9, 0)], unfit="not measured") == (False, "not measured")


def test_no_fp16_training_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DeviceError, match="fp16 needs a GPU"):
        choose_precision("fp16", "cpu", [])
    with pytest.raises(DeviceError, match="fp16 needs a GPU"):
        chosen_dtype("float16", True, torch.device("cpu"))
    assert chosen_dtype("float16", False, torch.device("cpu")) is torch.float16
    assert "can generate and be saved, but not be trained" in caplog.text


def test_trained_weights_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert chosen_dtype(None, True, torch.device("cuda")) is torch.float32
    assert chosen_dtype(torch.bfloat16, True, torch.device("cuda")) is torch.bfloat16
