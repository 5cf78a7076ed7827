"""`pantheraml doctor`: what each check says of hosts that are not as they should be."""

from __future__ import annotations

import importlib.metadata
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pantheraml.base import env
from pantheraml.base.errors import DeviceError, InstallationError, StorageError, error_classes
from pantheraml.runs import doctor
from pantheraml.runs.doctor import hardware, installation, trial
from pantheraml.specs import tested_versions
from pantheraml.specs.diagnosis import Check, Diagnosis, failed, ok, warning
from pantheraml.specs.plan import GPU, DeviceSpec
from pantheraml.specs.tested_versions import Versions

GIB = 1 << 30


def gpu(index: int = 0, *, name: str = "NVIDIA H200", free: int = 139, capability: tuple[int, int] = (9, 0)) -> GPU:
    return GPU(index=index, name=name, total_bytes=140 * GIB, free_bytes=free * GIB, compute_capability=capability)


def host(*gpus: GPU, driver: str | None = "580.1", cuda: str | None = "13.0", note: str | None = None) -> DeviceSpec:
    return DeviceSpec(gpus=gpus, cpu_count=2, ram_bytes=GIB, driver=driver, driver_cuda=cuda, note=note)


@pytest.mark.seed("C19")
@pytest.mark.parametrize(
    ("installed", "status", "found"),
    [
        (tested_versions.PACKAGES[0].cpu, "ok", ""),
        ("2.13.4+cu130", "ok", ""),  # a patch release, with the tag of a build
        ("2.12.0", "warning", "untested: tests run with 2.11.0 and 2.13.0"),
        ("2.10.0", "failed", "but <2.14,>=2.11 is needed"),
        (None, "failed", "not installed"),
    ],
)
def test_versions(installed: str | None, status: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "installed_version", lambda package: installed)
    check = installation.check_package(tested_versions.PACKAGES[0], Requirement("torch>=2.11,<2.14"))
    assert check.status == status
    assert found in check.found
    assert (check.fix is None) == (status == "ok")
    if status == "failed":
        assert check.error == "InstallationError"
        assert check.fix == "pip install 'torch<2.14,>=2.11'"


def test_an_optional_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "installed_version", lambda package: None)
    assert installation.check_package(Versions("trl", "1.16.0", None), None).status == "skipped"


def test_all_other_requirements_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = {name: Requirement(name + ">=2") for name in ("torch", "rich", "numpy", "plotly")}
    versions = {"rich": "1.0", "numpy": "2.0", "plotly": None}
    monkeypatch.setattr(installation, "installed_version", versions.__getitem__)
    check = installation.check_others(accepted)
    assert check.found == "rich 1.0 (>=2), plotly is missing (>=2)"
    assert check.fix == "pip install 'rich>=2' 'plotly>=2'"
    monkeypatch.setattr(installation, "installed_version", lambda package: "3.0")
    assert installation.check_others(accepted).found == "all 3 required ones, in accepted versions"


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(installation.importlib.metadata, "requires", missing)
    checks = installation.check_installation()
    assert [check.status for check in checks if check.name == "torch"] == ["ok"]
    assert (checks[-1].status, "pip install" in str(checks[-1].fix)) == ("warning", True)


def test_this_installation_is_fit_for_its_own_tests() -> None:
    checks = installation.check_installation()
    assert not [check for check in checks if check.status == "failed"]
    assert {"Python", "torch", "transformers", "other packages"} <= {check.name for check in checks}
    assert "torch" not in {name for check in checks if check.name == "other packages" for name in check.values}


@pytest.mark.seed("S2-080")
@pytest.mark.parametrize(
    ("devices", "build", "status", "words"),
    [
        (host(gpu()), "CUDA 13.0", "ok", "580.1, for CUDA up to 13.0"),
        (host(gpu(), cuda="12.4"), "CUDA 13.0", "failed", "torch is built for CUDA 13.0"),
        (host(gpu(), cuda="13.0"), "CUDA 12.8", "ok", ""),
        (host(gpu()), None, "failed", "torch is a build for CPUs"),
        (host(driver=None, cuda=None, note="no NVIDIA driver: x"), None, "warning", "no NVIDIA driver"),
    ],
)
def test_driver(devices: DeviceSpec, build: str | None, status: str, words: str) -> None:
    check = hardware.check_driver(devices, build)
    assert check.status == status
    assert words in check.found
    assert (check.fix is None) == (status == "ok")


@pytest.mark.seed("S2-047", "S2-078")
def test_gpus() -> None:
    (check,) = hardware.check_gpus([gpu(0), gpu(1)])
    assert (check.status, check.found) == ("ok", "2 x NVIDIA H200, 140 GiB, compute capability 9.0")
    (check,) = hardware.check_gpus([gpu(0), gpu(1, name="Tesla K80", capability=(3, 7))])
    assert (check.status, check.error) == ("failed", "DeviceError")
    assert "GPU 1 is too old: compute capability 7.0 or newer is needed" in check.found
    (check,) = hardware.check_gpus([gpu(0), gpu(1, name="NVIDIA A100", capability=(8, 0))])
    assert (check.status, check.fix is not None) == ("warning", True)
    assert "batch_shares=adaptive" in str(check.fix)
    _, busy = hardware.check_gpus([gpu(0), gpu(1, free=3)])
    assert (busy.name, busy.status, busy.found) == ("GPU 1", "warning", "only 3 GiB of 140 GiB are free")


def test_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (check,) = hardware.check_gpus([])
    assert (check.status, check.fix) == ("skipped", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    (check,) = hardware.check_gpus([])
    assert (check.status, "Unset CUDA_VISIBLE_DEVICES" in str(check.fix)) == ("warning", True)


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.check_disk("cache", tmp_path / "not" / "yet").status in ("ok", "warning")
    for free, status in ((30 * GIB, "ok"), (5 * GIB, "warning"), (GIB // 2, "failed")):
        monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path, free=free: _Usage(free))
        check = hardware.check_disk("cache", tmp_path)
        assert check.status == status
        assert check.values["free_bytes"] == free
    assert check.error == StorageError.__name__


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = self.total = free


def test_small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.check_shared_memory(tmp_path / "absent").status == "skipped"
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda path: _Usage(64 << 20))
    check = hardware.check_shared_memory(tmp_path)
    assert (check.status, "--shm-size" in str(check.fix)) == ("warning", True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    check = hardware.check_disk("cache", tmp_path)
    assert (check.status, check.fix) == ("warning", "Set PANTHERAML_CACHE to a folder of your own.")


@pytest.mark.seed("S0-117")
def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.settings_in_environment():
        monkeypatch.delenv(name)
    assert hardware.check_environment().found == "no variable changes what runs do"
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PANTHERAML_RUN_TOKEN", "a-secret-of-many-letters")
    check = hardware.check_environment()
    assert check.found == "NCCL_DEBUG=INFO, PANTHERAML_RUN_TOKEN=(set)"
    assert "a-secret" not in check.model_dump_json()


def facts_script(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "facts.py").write_text(code)
    monkeypatch.setattr(trial, "python_module", lambda name: [sys.executable, str(tmp_path / "facts.py")])


@pytest.mark.parametrize(
    ("code", "gpus", "status", "words"),
    [
        ("print('{}')", 0, "ok", "sees no GPUs"),
        ("print('{}')", 2, "failed", "it sees 0 of 2 GPU(s): no reason given"),
        ("raise ImportError('libcudart.so.13: cannot open')", 0, "failed", "ImportError: libcudart.so.13: cannot open"),
        ("import time; time.sleep(100)", 0, "failed", "not imported after 1 s"),
    ],
)
def test_torch_in_its_own_process(
    code: str, gpus: int, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = '{"version": "2.13.0", "cuda": null, "nccl": null, "gpus": 0, "problem": null}'
    facts_script(tmp_path, code.replace("{}", facts), monkeypatch)
    if "sleep" in code:
        monkeypatch.setattr(trial, "IMPORT_SECONDS", 1.0)
    check = trial.check_torch(gpus)
    assert check.status == status
    assert words in check.found
    assert (check.fix is None) == (status == "ok")


def test_without_torch_the_rest_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = failed("import torch", InstallationError("it is broken", fix="Mend it."))
    monkeypatch.setattr(doctor, "check_torch", lambda gpus: broken)
    checks = list(doctor.examine(lambda text: _Doing()))
    assert [check.status for check in checks[-3:]] == ["failed", "skipped", "skipped"]
    assert Diagnosis(version="1", checks=tuple(checks)).exit_code == InstallationError.exit_code


class _Doing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


def test_every_problem_has_a_fix_and_a_class() -> None:
    check = failed("GPUs", DeviceError("it is gone", where="GPU 3"))
    assert (check.found, check.error) == ("it is gone (GPU 3)", "DeviceError")
    assert check.fix
    assert check.error in error_classes()


def test_exit_code_is_that_of_the_first_failure() -> None:
    def code(*checks: Check) -> int:
        return Diagnosis(version="1", checks=checks).exit_code

    bad = failed("disk", StorageError("full", fix="x"))
    assert code(ok("a", "b"), warning("c", "d", "e")) == 0
    assert code(ok("a", "b"), bad, failed("torch", InstallationError("x", fix="y"))) == StorageError.exit_code


def test_two_ranks_where_there_are_fewer_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = trial._tiny_run(tmp_path)
    for gpus, count, backend in (((), 2, "gloo"), ((gpu(),), 2, "gloo"), ((gpu(0), gpu(1), gpu(2)), 3, "nccl")):
        monkeypatch.setattr(trial, "probe", lambda gpus=gpus: host(*gpus))
        plan = trial._plan_for_ranks(config)
        assert (plan.world_size, plan.backend, plan.dims.replicate) == (count, backend, count)
