"""Files in `deploy/` are well-formed, use valid commands, and have a working health check."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from pantheraml.cli.main import parse
from pantheraml.cli.serve import checked_database_url
from tests.service.conftest import Server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BIN = Path(sys.executable).parent


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, with their arguments."""
    lines = [line for line in (DEPLOY / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines()) if name]


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_hadolint_has_nothing_to_say(tmp_path: Path) -> None:
    done = run(BIN / "hadolint", DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text((DEPLOY / "Dockerfile").read_text().replace("USER 10001:10001", "USER root"))
    assert "DL3002" in run(BIN / "hadolint", worse).stdout, "it would see a container of root's"


def test_compose_lint_finds_nothing_grave(tmp_path: Path) -> None:
    done = run(BIN / "compose-lint", "check", DEPLOY / "compose.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    changed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    changed["services"]["service"]["privileged"] = True
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(changed))
    assert run(BIN / "compose-lint", "check", tmp_path / "compose.yaml", cwd=tmp_path).returncode != 0


@pytest.mark.seed("S4-142")
def test_the_image_runs_the_service_as_nobody_special() -> None:
    found = instructions()
    last = {name: rest for name, rest in found}  # noqa: C416 - the last of each counts
    assert last["USER"] == "10001:10001"
    assert "cuda" in dict(rest.split("=") for name, rest in found if name == "ARG")["CUDA_IMAGE"]
    entry, command = (json.loads(last[name]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["tini", "--", "pantheraml"]
    arguments = parse(command)
    assert (arguments.command, arguments.port) == ("serve", 8000)
    assert json.loads(last["VOLUME"]) == [arguments.data_dir, arguments.models_dir]
    assert last["EXPOSE"] == str(arguments.port)
    copied = [name for each, rest in found if each == "COPY" and "--from" not in rest for name in rest.split()[:-1]]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == allowed
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_installs_what_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)
    names = {name.lower().replace("_", "-") for name in pinned}
    assert {Requirement(text).name for text in project["optional-dependencies"]["service"]} <= names


def test_compose_agrees_with_the_image_and_the_command_line() -> None:
    service, database = COMPOSE["services"]["service"], COMPOSE["services"]["database"]
    last = {name: rest for name, rest in instructions()}  # noqa: C416
    assert service["command"] == json.loads(last["CMD"])
    assert service["healthcheck"]["test"] == ["CMD", *json.loads(last["HEALTHCHECK"].partition("CMD ")[2])]
    secret = re.sub(r"\$\{.*?\}", "secret", service["environment"]["PANTHERAML_DATABASE_URL"])
    assert checked_database_url(secret) == "postgresql://pantheraml:secret@database/pantheraml"
    assert database["environment"]["POSTGRES_USER"] == database["environment"]["POSTGRES_DB"] == "pantheraml"
    assert [port.split(":")[0] for port in service["ports"]] == ["127.0.0.1"], "others come by way of a proxy"
    mounted = {volume.split(":")[-1 if volume.count(":") == 1 else 1].split("}")[-1] for volume in service["volumes"]}
    assert "/data" in mounted


def test_the_health_check_sees_whether_it_works(own_server: Callable[..., Server]) -> None:
    command = json.loads({name: rest for name, rest in instructions()}["HEALTHCHECK"].partition("CMD ")[2])  # noqa: C416
    server = own_server()
    command = [part.replace("http://127.0.0.1:8000", server.url) for part in command]
    assert server.url in command[-1]
    assert run(sys.executable, *command[1:]).returncode == 0
    server.kill()
    assert run(sys.executable, *command[1:]).returncode != 0


UNIT = (DEPLOY / "pantheraml.service").read_text()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (package systemd)"
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "pantheraml.service"
    unit.write_text(UNIT.replace("/opt/pantheraml/bin/pantheraml", "/bin/true"))
    done = run("systemd-analyze", "verify", unit)
    told = [line for line in done.stderr.splitlines() if "pantheraml" in line]
    assert (done.returncode, told) == (0, [])
    unit.write_text(UNIT.replace("KillMode=process", "KillMode=jobs"))
    assert "Failed to parse kill mode" in run("systemd-analyze", "verify", unit).stderr


def test_the_unit_leaves_jobs_alone() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT)
    service = parser["Service"]
    assert service["KillMode"] == "process"
    assert "PrivateTmp" not in service, "it would be taken away from jobs that go on"
    arguments = parse(shlex.split(service["ExecStart"])[1:])
    assert arguments.data_dir == service["ReadWritePaths"] == f"/var/lib/{service['StateDirectory']}"
