"""Rank, rendezvous address and switches from the environment variables of each launcher."""

from __future__ import annotations

import ctypes
import os

import pytest

from pantheraml.base import env
from pantheraml.base.errors import LaunchError

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
             "TORCHELASTIC_RESTART_COUNT", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS",
             "LOCAL_WORLD_SIZE", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "PANTHERAML_ENABLE_MULTIGPU",
             "UNSLOTH_ENABLE_MULTIGPU", "PANTHERAML_NPROC")  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_single_process_has_no_launched_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.launched_rank() is None
    assert env.process_rank() == env.ProcessRank(rank=0, local_rank=0, world_size=1)
    # a batch script has these variables, but is a single process
    set_variables(monkeypatch, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="4")
    assert env.launched_rank() is None


@pytest.mark.seed("S0-042", "S2-030", "S2-031", "S4-010")
def test_rank_from_torchrun_and_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, RANK="5", LOCAL_RANK="1", WORLD_SIZE="8")
    assert env.launched_rank() == env.ProcessRank(rank=5, local_rank=1, world_size=8)
    set_variables(monkeypatch, LOCAL_WORLD_SIZE="4")
    assert env.process_rank().local_world_size == 4


def test_rank_from_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_STEP_NUM_TASKS="4")
    place = env.launched_rank()
    assert place == env.ProcessRank(rank=3, local_rank=1, world_size=4)
    assert env.rank_variables(place) == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    for node, here in (("0", 2), ("2", 2), ("3", 1), ("4", None)):
        set_variables(monkeypatch, SLURM_NODEID=node, SLURM_STEP_TASKS_PER_NODE="2(x3),1")
        assert env.process_rank().local_world_size == here
    assert env.rank_variables(env.ProcessRank(0, 0, 4, 2))["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.seed("S4-117", "S4-128")
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "LOCAL_RANK, WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "LOCAL_RANK"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK=2 is not a rank of WORLD_SIZE=2"),
        ({"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "RANK='one' is not a number"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "SLURM_LOCALID"),
    ],
)
def test_incomplete_rank_variables_are_an_error(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    set_variables(monkeypatch, **variables)
    with pytest.raises(LaunchError, match=message):
        env.launched_rank()


def test_store_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR and MASTER_PORT"):
        env.store_address()
    set_variables(monkeypatch, MASTER_ADDR="node0", MASTER_PORT="29500")
    assert env.store_address() == env.StoreAddress("node0", 29500, hosted_by_agent=False, attempt=0)
    set_variables(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="2")
    assert env.store_address() == env.StoreAddress("node0", 29500, hosted_by_agent=True, attempt=2)


@pytest.mark.parametrize("hosted_by_agent", [True, False])
def test_store_variables_round_trip(monkeypatch: pytest.MonkeyPatch, hosted_by_agent: bool) -> None:
    address = env.StoreAddress("node0", 29500, hosted_by_agent=hosted_by_agent, attempt=3)
    set_variables(monkeypatch, **env.store_variables(address))
    assert env.store_address() == address
    assert env.started_by_agent() == hosted_by_agent


@pytest.mark.seed("S2-029")
def test_multi_gpu_switch_and_nproc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not env.multi_gpu_requested()
    set_variables(monkeypatch, UNSLOTH_ENABLE_MULTIGPU="1")
    assert env.multi_gpu_requested()
    set_variables(monkeypatch, PANTHERAML_ENABLE_MULTIGPU="0")
    assert not env.multi_gpu_requested(), "our own variable takes precedence"
    assert env.processes_requested() is None
    set_variables(monkeypatch, PANTHERAML_NPROC="3")
    assert env.processes_requested() == 3
    set_variables(monkeypatch, PANTHERAML_NPROC="all")
    with pytest.raises(LaunchError, match="PANTHERAML_NPROC='all' is not a number"):
        env.processes_requested()


def c_getenv(name: bytes) -> bytes | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value: bytes | None = getenv(name)
    return value


def test_native_default_survives_restoring_os_environ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(os.environ)
    env.set_native_default("PANTHERAML_TEST_NATIVE", "0")
    try:
        os.environ.clear()
        os.environ.update(before)
        assert c_getenv(b"PANTHERAML_TEST_NATIVE") == b"0"
        assert "PANTHERAML_TEST_NATIVE" not in env.child_environment()
        monkeypatch.setenv("PANTHERAML_TEST_NATIVE", "7")
        env.set_native_default("PANTHERAML_TEST_NATIVE", "0")
        assert c_getenv(b"PANTHERAML_TEST_NATIVE") == b"7"
    finally:
        os.unsetenv("PANTHERAML_TEST_NATIVE")


def test_outside_of_the_launch_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    child = env.worker_environment(**env.outside_of_launch())
    assert not {"RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & set(child)
    assert "SLURM_JOB_ID" in child
