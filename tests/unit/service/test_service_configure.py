"""From a request to a plan, on machines with and without GPUs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import ConfigError, DeviceError, OutOfMemoryError
from pantheraml.planner.known_models import known_config
from pantheraml.service.jobs.configure import Inputs, PlannedJob, configure
from pantheraml.service.jobs.inventory import gpu_indices
from pantheraml.service.schemas.fine_tuning import CreateJob
from pantheraml.specs.plan import GPU, DeviceSpec
from tests import toy

GIB = 1 << 30


def machine(gpus: int) -> DeviceSpec:
    cards = tuple(
        GPU(index=i, name="H200", total_bytes=140 * GIB, free_bytes=139 * GIB, compute_capability=(9, 0))
        for i in range(gpus)
    )
    return DeviceSpec(gpus=cards, cpu_count=4, ram_bytes=64 * GIB, driver="580" if gpus else None)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    root = tmp_path_factory.mktemp("inputs")
    (root / "tiny").mkdir()
    model = toy.write_llama(root / "tiny")
    return Inputs(model, toy.write_jsonl(root / "rows.jsonl", toy.arithmetic(40)), 40, None)


def planned(inputs: Inputs, gpus: int, **own: Any) -> PlannedJob:
    body = {"model": "tiny", "training_file": "file-1", "pantheraml": own}
    return configure(CreateJob.model_validate(body), inputs, 7, machine(gpus))


def test_a_job_uses_every_gpu_unless_it_says_how_many(inputs: Inputs) -> None:
    whole = planned(inputs, 4)
    assert (whole.plan.device, whole.plan.world_size, whole.devices) == ("cuda", 4, 4)
    assert whole.config["parallel"]["world_size"] == 4, "so that a resumed job has as many"
    two = planned(inputs, 4, processes=2)
    assert (two.plan.world_size, two.devices) == (2, 2)


def test_data_parallel_leases_the_gpus_of_its_one_process(inputs: Inputs) -> None:
    plan = planned(inputs, 4, processes=2, mode="dataparallel")
    assert (plan.plan.world_size, plan.devices) == (1, 2)


def large(inputs: Inputs, tmp_path: Path, name: str) -> Inputs:
    """A model of which only the sizes are here."""
    (tmp_path / "config.json").write_text(json.dumps(known_config(name)))
    return dataclasses.replace(inputs, model=tmp_path)


def test_the_time_of_a_job_is_predicted_for_the_queue(inputs: Inputs, tmp_path: Path) -> None:
    """Backfill and `estimated_start` read it; memory that running jobs use now does not count."""
    busy = machine(1).gpus[0].model_copy(update={"name": "NVIDIA H200", "free_bytes": GIB})
    devices = machine(1).model_copy(update={"gpus": (busy,)})
    body = CreateJob.model_validate({"model": "tiny", "training_file": "file-1"})
    planned = configure(body, large(inputs, tmp_path, "llama-3.1-8b"), 7, devices)
    plan = planned.plan
    assert plan.prediction is not None
    assert plan.prediction.steps == 8, "three epochs of 40 rows in batches of 16"
    assert plan.prediction.step_seconds is not None
    assert plan.predicted_seconds == pytest.approx(8 * plan.prediction.step_seconds)
    assert plan.predicted_memory_bytes is not None
    assert planned.gpu_hours == pytest.approx(plan.predicted_seconds / 3600)
    assert configure(body, inputs, 7, machine(0)).gpu_hours == 0.0


def test_a_job_that_cannot_fit_is_refused_with_what_would(inputs: Inputs, tmp_path: Path) -> None:
    own = {"config": {"method": {"kind": "full"}}, "processes": 1}
    body = CreateJob.model_validate({"model": "tiny", "training_file": "file-1", "pantheraml": own})
    with pytest.raises(OutOfMemoryError, match=r"at least .* GiB would be needed") as caught:
        configure(body, large(inputs, tmp_path, "llama-3.1-70b"), 7, machine(1))
    assert "method.kind=qlora" in str(caught.value.fix)


def test_a_job_takes_cpu_slots_by_its_memory(inputs: Inputs, tmp_path: Path) -> None:
    """Else jobs side by side would fill the memory of the machine, and be killed with the service."""

    def on_cpu(ram: int, slots: int, **own: Any) -> PlannedJob:
        body = CreateJob.model_validate({"model": "tiny", "training_file": "file-1", "pantheraml": own})
        devices = machine(0).model_copy(update={"ram_bytes": ram * GIB})
        return configure(body, large(inputs, tmp_path, "llama-3.1-8b"), 7, devices, cpu_slots=slots)

    few = on_cpu(256, 4)
    assert (few.devices, few.plan.warnings) == (1, ())
    some = on_cpu(64, 8)
    weights = 8.03e9 * (4 if some.plan.precision == "fp32" else 2) / GIB
    assert some.devices == math.ceil(weights / 8)
    assert f"it takes {some.devices} of 8 CPU slots" in some.plan.warnings[-1]
    assert on_cpu(64, 1).devices == 1
    with pytest.raises(OutOfMemoryError, match=r"at least 1\d\d.\d GiB would be needed, and there are 64.0 GiB"):
        on_cpu(64, 1, config={"method": {"kind": "full"}})
    with pytest.raises(OutOfMemoryError, match="GiB would be needed"):
        on_cpu(64, 1, config={"method": {"rank": 60_000}})


def test_more_gpus_than_there_are(inputs: Inputs) -> None:
    with pytest.raises((ConfigError, DeviceError), match="2 GPU"):
        planned(inputs, 2, processes=3)


def test_settings_reach_the_configuration(inputs: Inputs) -> None:
    given = {"method": {"kind": "dora", "rank": 4}, "train": {"warmup_steps": 3}, "data": {"seq_len": 32}}
    config = planned(inputs, 0, config=given).config
    assert (config["method"]["kind"], config["method"]["rank"]) == ("dora", 4)
    assert (config["train"]["warmup_steps"], config["data"]["seq_len"]) == (3, 32)
    assert (config["train"]["seed"], config["data"]["packing"]) == (7, False)
    assert planned(inputs, 0).config["data"]["seq_len"] == 256, "the positions that the model has"


def test_leases_become_gpu_indices() -> None:
    assert gpu_indices(["gpu:3", "gpu:0"]) == [3, 0]
    assert gpu_indices(["cpu:0"]) is None
