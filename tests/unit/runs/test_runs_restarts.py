"""Restarts of a run after its processes ended, from the error, the checkpoints and the configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pantheraml.base.errors import (
    DataError,
    HangError,
    OutOfMemoryError,
    PantheraError,
    PassTooLargeError,
    WorkerError,
    WorkerKilledError,
)
from pantheraml.planner.choose import choose
from pantheraml.runs import restarts
from pantheraml.runs.restarts import Restarts
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig

HARDWARE = DeviceSpec(gpus=(), cpu_count=4, ram_bytes=2**33, driver=None)
KILLED = WorkerKilledError("Rank 1 was killed by SIGKILL.")


def restarts_of(folder: Path, **parallel: Any) -> Restarts:
    config = TrainConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d"},
            "train": {"global_batch_size": 16, "micro_batch_size": 4},
            "parallel": {"world_size": 3, "max_retries": 2, **parallel},
        }
    )
    return Restarts(RunDir(folder), config, choose(config, HARDWARE))


@pytest.fixture(autouse=True)
def _hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "devices_for_run", lambda config: HARDWARE)


def save(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()


def test_starts_in_vain_are_counted_and_forgotten_after_progress(tmp_path: Path) -> None:
    run = restarts_of(tmp_path)
    first, second = run.after(KILLED), run.after(KILLED)
    assert first is not None
    assert first.message == (
        "Rank 1 was killed by SIGKILL. Resuming from the beginning (restart 1 of 2 without a new checkpoint)."
    )
    assert second is not None
    save(tmp_path, 7)
    third = run.after(KILLED)
    assert third is not None
    assert "from step 7 (restart 1 of 2" in third.message
    assert run.after(KILLED) is not None
    assert run.after(KILLED) is None


@pytest.mark.parametrize(
    ("err", "word"), [(WorkerError("A bug."), "failed"), (HangError("Rank 1 is stuck."), "hung"), (KILLED, "killed")]
)
def test_only_what_the_configuration_names_starts_again(tmp_path: Path, err: PantheraError, word: str) -> None:
    assert (restarts_of(tmp_path).after(err) is not None) == (word == "killed")
    assert restarts_of(tmp_path, restart_on=[]).after(err) is None
    following = restarts_of(tmp_path, restart_on=[word]).after(err)
    assert following is not None
    assert following.plan.world_size == 3


@pytest.mark.parametrize("err", [DataError("A bad row."), OutOfMemoryError("One sequence does not fit.")])
def test_an_error_that_was_foreseen_ends_the_run(tmp_path: Path, err: PantheraError) -> None:
    everything = restarts_of(tmp_path, restart_on=["killed", "failed", "hung"], min_world_size=1)
    assert everything.after(err) is None


def test_passes_are_halved_down_to_one_sequence(tmp_path: Path) -> None:
    run = restarts_of(tmp_path, max_retries=0)
    err = PassTooLargeError("Rank 1 ran out of memory with 4 sequences at a time.")
    plans = []
    while (following := run.after(err)) is not None:
        assert "the global batch, and so the result, stays" in following.message
        plans.append(following.plan)
    assert [plan.fits for plan in plans] == [2, 1]
    assert {plan.micro_batch_size for plan in plans} == {4}, "what was planned stays known"


@pytest.mark.seed("S0-112", "S0-113")
def test_fewer_processes_carry_the_same_batch(tmp_path: Path) -> None:
    run = restarts_of(tmp_path, max_retries=1, min_world_size=2)
    run.after(PassTooLargeError("Too much."))
    assert run.after(KILLED) is not None
    fewer = run.after(KILLED)
    assert fewer is not None
    assert "with 2 of 3 ranks; the global batch, and so the result, stays the same" in fewer.message
    assert (fewer.plan.world_size, fewer.plan.dims.replicate) == (2, 2)
    assert (fewer.plan.global_batch_size, fewer.plan.fits) == (16, 2)
    again = run.after(KILLED)
    assert again is not None
    assert again.plan.world_size == 2
    assert run.after(KILLED) is None, "not fewer than asked for"


def test_the_gpu_of_the_rank_that_is_lost_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(
        GPU(index=index, name="x", total_bytes=2**36, free_bytes=2**36, compute_capability=(9, 0)) for index in range(4)
    )
    monkeypatch.setattr(f"{__name__}.HARDWARE", HARDWARE.model_copy(update={"gpus": gpus}))
    monkeypatch.setattr(restarts, "devices_for_run", lambda config: HARDWARE)
    run = restarts_of(tmp_path, max_retries=1, min_world_size=1, device_ids=[0, 2, 3])
    assert run.after(KILLED) is not None
    fewer = run.after(WorkerKilledError("Rank 0 was killed by SIGKILL."))
    assert fewer is not None
    assert fewer.plan.device_ids == (2, 3)
    somebody = WorkerKilledError("A worker process was killed by SIGKILL.")
    assert run.after(somebody) is not None
    last = run.after(somebody)
    assert last is not None
    assert last.plan.device_ids == (2,), "what was lost is not tried again"


def test_a_number_that_cannot_divide_the_work_is_passed_over(tmp_path: Path) -> None:
    run = restarts_of(tmp_path, world_size=4, shard=2, max_retries=0, min_world_size=1)
    fewer = run.after(KILLED)
    assert fewer is not None
    assert fewer.plan.dims.shard == fewer.plan.world_size == 2
    assert run.after(KILLED) is None, "one process has no shards"
