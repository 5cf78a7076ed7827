"""Environment of child processes: no imports from the working directory, and no secrets they do not need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from pantheraml.base import env
from pantheraml.launch import nodes, ranks, script
from pantheraml.launch.local import task_command, worker_environment
from pantheraml.launch.nodes import NodeSpec
from pantheraml.planner.choose import choose
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig

SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "MLFLOW_TRACKING_PASSWORD",
           "GITHUB_TOKEN", "SSH_AUTH_SOCK", "DATABASE_URL", "NVIDIA_API_KEY", "SLURM_JWT", "PANTHERAML_API_KEY",
           "PANTHERAML_DATABASE_URL", "PANTHERAML_INFERENCE_KEY", "KUBERNETES_SERVICE_HOST")  # fmt: skip
NEEDED = ("PATH", "HOME", "LC_ALL", "LD_LIBRARY_PATH", "CUDA_HOME", "NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "HF_TOKEN",
          "HF_HOME", "TORCH_LOGS", "TRITON_CACHE_DIR", "PANTHERAML_CACHE", "https_proxy", "SSL_CERT_FILE", "RANK",
          "SLURM_PROCID", "XDG_CACHE_HOME", "PYTHONHASHSEED")  # fmt: skip


def test_secrets_are_not_passed_to_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    for name in (*SECRETS, *NEEDED):
        if name != "PANTHERAML_CACHE":
            monkeypatch.setenv(name, "something")
    seen = worker_environment(None)
    assert not set(SECRETS) & set(seen)
    assert set(NEEDED) <= set(seen)
    monkeypatch.setenv("PANTHERAML_PASS_ENV", "OPENAI_API_KEY, AWS_*")
    seen = worker_environment(None)
    assert {"OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"} == set(SECRETS) & set(seen)


def test_a_script_of_the_users_keeps_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "something")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    seen = script._rank_environment(2)
    assert seen["WANDB_API_KEY"] == "something"
    assert "PYTHONSAFEPATH" not in seen


@pytest.mark.parametrize("path", [":/elsewhere", "/elsewhere::", "/elsewhere"])
def test_no_worker_imports_from_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "argparse.py").write_text("open('marker', 'w')")
    code = "import argparse, sys; print('' in sys.path, '/elsewhere' in sys.path)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=worker_environment(None), capture_output=True, text=True, check=True
    )
    assert done.stdout == "False True\n"
    assert not (tmp_path / "marker").exists()


def test_every_module_is_started_with_safe_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    started: list[list[str]] = []
    monkeypatch.setattr(nodes.os, "execve", lambda _, command, __: started.append(command))
    nodes.become_agent(NodeSpec(2, 0, "10.0.0.1", 1), 1, config, tmp_path)
    agents = [make(2, ["python", "user.py"]) for make in (script.agent_command, script.ranks_command)]
    for command in (*started, *agents, task_command("train", tmp_path), ranks.join_command(tmp_path, config)):
        assert command[:3] == [sys.executable, "-P", "-m"]
    assert all(agent[-2:] == ["python", "user.py"] for agent in agents), "unchanged"


def test_compiled_kernels_go_to_a_private_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = Path(worker_environment(None)["TORCHINDUCTOR_CACHE_DIR"])
    assert folder == tmp_path / "cache/inductor"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    assert worker_environment(None)["TORCHINDUCTOR_CACHE_DIR"] == str(folder), "torch's own choice is not the user's"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert worker_environment(None)["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert env.kernel_cache() == {}


@pytest.mark.parametrize("planted", ["folder", "link"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to somebody else")
def test_a_kernel_cache_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folder = tmp_path / "inductor"
    if planted == "folder":
        folder.mkdir(mode=0o777)
    else:
        (tmp_path / "own").mkdir()
        folder.symlink_to("own")
    os.chown(folder, 65534, 65534, follow_symlinks=False)
    used = Path(worker_environment(None)["TORCHINDUCTOR_CACHE_DIR"])
    assert used.resolve() != folder.resolve()
    assert (used.stat().st_uid, used.stat().st_mode & 0o777) == (0, 0o700)
    assert worker_environment(None)["TORCHINDUCTOR_CACHE_DIR"] == str(used), "one for all of a command's workers"
    assert f"{folder} cannot be used" in caplog.text
    shutil.rmtree(used)


def test_workers_see_the_gpus_of_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PANTHERAML_CACHE", str(tmp_path))
    gpus = tuple(GPU(index=index, name="GPU", total_bytes=1, free_bytes=1, compute_capability=None) for index in (1, 3))
    config = TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))
    whole = choose(config, DeviceSpec(gpus=gpus, cpu_count=1, ram_bytes=1, driver=None))
    assert worker_environment(whole)["CUDA_VISIBLE_DEVICES"] == "1,3"
    instance = gpus[0].model_copy(update={"mig_uuid": "MIG-1a2b"})
    part = choose(config, DeviceSpec(gpus=(instance,), cpu_count=1, ram_bytes=1, driver=None))
    assert worker_environment(part)["CUDA_VISIBLE_DEVICES"] == "MIG-1a2b", "GPU 1 would be its first instance"
