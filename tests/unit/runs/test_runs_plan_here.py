"""A stored plan is replayed only for the model, data and devices that it was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.env import ProcessRank
from pantheraml.base.errors import ConfigError, DeviceError, PantheraError
from pantheraml.planner.known_models import known_config
from pantheraml.planner.plan_run import plan_run
from pantheraml.runs.plan_here import check_replayable, inputs_of, read_plan
from pantheraml.specs.plan import GPU, DeviceSpec, Plan
from pantheraml.specs.train import TrainConfig

GIB = 1 << 30


def machine(*names: str, gibibytes: int = 80) -> DeviceSpec:
    gpus = tuple(
        GPU(index=i, name=name, total_bytes=gibibytes * GIB, free_bytes=gibibytes * GIB, compute_capability=(9, 0))
        for i, name in enumerate(names)
    )
    return DeviceSpec(gpus=gpus, cpu_count=8, ram_bytes=None, driver=None)


H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., TrainConfig]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(known_config("llama-3.2-1b")))
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')

    def config(**sections: Any) -> TrainConfig:
        data = {"path": str(tmp_path / "data.jsonl")}
        return TrainConfig.model_validate({"model": {"path": str(tmp_path / "model")}, "data": data, **sections})

    return config


def made(config: TrainConfig, devices: DeviceSpec) -> Plan:
    return plan_run(config, devices).model_copy(update={"made_for": inputs_of(config, devices)})


def test_the_same_run_is_replayed(given: Callable[..., TrainConfig], tmp_path: Path) -> None:
    plan = made(given(), machine(H100, H100))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.model_dump(mode="json")))
    again = read_plan(file)
    assert again == plan
    check_replayable(again, given(), machine(H100, H100), None)
    check_replayable(again, given(train={"learning_rate": 1e-5}), machine(H100, H100), None)
    described = plan.model_copy(update={"made_for": inputs_of(given(), machine("H100", "H100"))})
    check_replayable(described, given(), machine(H100, H100), None)


def test_another_run_is_refused(given: Callable[..., TrainConfig], tmp_path: Path) -> None:
    devices = machine(H100, H100)
    plan = made(given(), devices)

    def refused(
        told: str, config: TrainConfig, here: DeviceSpec = devices, place: ProcessRank | None = None
    ) -> PantheraError:
        with pytest.raises((ConfigError, DeviceError), match=told) as caught:
            check_replayable(plan, config, here, place)
        return caught.value

    refused("another value of data.seq_len", given(data={"path": str(tmp_path / "data.jsonl"), "seq_len": 64}))
    refused("another value of method.kind, model.precision", given(method={"kind": "full"}, model=_bf16(given)))
    refused("another value of train.global_batch_size", given(train={"global_batch_size": 4}))
    refused("uses GPU 1", given(), machine(H100))
    refused("is a NVIDIA A100-SXM4-80GB", given(), machine(H100, "NVIDIA A100-SXM4-80GB"))
    refused("less memory", given(), machine(H100, H100, gibibytes=40))
    refused("for 2 process", given(), devices, ProcessRank(0, 0, 4))
    refused("usable are none", given(), machine())
    (tmp_path / "data.jsonl").write_text('{"text": "b"}\n')
    refused("other data", given())
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "model/config.json").write_text(json.dumps(known_config("llama-3.2-3b")))
    assert "plan" in str(refused("is another one", given()).fix)


def _bf16(given: Callable[..., TrainConfig]) -> dict[str, str]:
    return {"path": given().model.path, "precision": "bf16"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"device": "cuda"}', "[" * 100_000])
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="This file is not a plan"):
        read_plan(file)


def test_a_plan_of_a_run_folder_does_not_say_what_it_is_for(given: Callable[..., TrainConfig], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan_run(given(), machine(H100)).model_dump(mode="json")))
    with pytest.raises(ConfigError, match="does not say what it was made for"):
        read_plan(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "absent.json")


def test_frozen_weights_keep_their_format_when_a_run_is_resumed(given: Callable[..., TrainConfig]) -> None:
    """Free memory may differ at each start; the numbers of a run may not."""
    small, roomy = machine("Some GPU", gibibytes=3), machine("Some GPU", gibibytes=40)
    first = plan_run(given(), small)
    assert first.frozen_weights == "nf4"
    assert plan_run(given(), roomy).frozen_weights is not None  # fp8
    resumed = plan_run(given(), roomy, resumed=first)
    assert resumed.frozen_weights == "nf4"
    assert resumed.reason("frozen_weights") == "as before the run was interrupted"
    plain = plan_run(given(), roomy)
    assert plan_run(given(), small, resumed=plain).frozen_weights == plain.frozen_weights
