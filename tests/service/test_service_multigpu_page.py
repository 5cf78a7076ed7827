"""docs/service-multigpu.md, executed: its blocks run as they stand, against a server and without one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from pantheraml.base.env import child_environment
from pantheraml.service.routes import multigpu, multigpu_control
from tests.service.conftest import Server

PAGE = (Path(__file__).parents[2] / "docs/service-multigpu.md").read_text()
SHELL, PROGRAMS = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("bash", "python"))


@pytest.mark.extended
@pytest.mark.seed("S4-023", "S4-025", "S4-127")
def test_the_commands(own_server: Callable[..., Server]) -> None:
    server = own_server("--cpu-slots", "1")
    printed = []
    for code in SHELL:
        command = ["bash", "-euo", "pipefail", "-c", code.replace("http://localhost:8000", server.url)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done
        printed.append([json.loads(line) for line in done.stdout.replace("}{", "}\n{").splitlines()])
    (stored, _, config), (trained, history), (tested, advice, disabled, enabled) = printed
    assert stored == config
    assert config["gradient_accumulation_steps"] == 2
    assert (trained["status"], trained["hyperparameters"]["batch_size"]) == ("succeeded", 4)
    assert history["history"][0] == trained
    assert tested["status"] == "passed"
    assert advice["recommendations"]
    assert [answer["devices"][0]["enabled"] for answer in (disabled, enabled)] == [False, True]


@pytest.mark.extended
def test_the_programs(models: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(models)
    for code in PROGRAMS:
        command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done
        if "asyncio.run" in code:
            assert done.stdout.startswith("succeeded [")


def test_every_endpoint_is_on_the_page() -> None:
    table = PAGE.split("| endpoint |")[1].split("\n\n")[0]
    named = {
        (method, path) for method, paths in re.findall(r"`(GET|POST) ([\w/{},]+)`", table) for path in _expanded(paths)
    }
    routes = [route for router in (multigpu.router, multigpu_control.router) for route in router.routes]
    found = {
        (method, route.path.removeprefix("/multigpu").strip("/"))
        for route in routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    assert len(found) == 16
    assert named == found


def _expanded(path: str) -> list[str]:
    braces = re.fullmatch(r"(.*)\{(\w+(?:,\w+)+)\}", path)
    return [path] if braces is None else [braces[1] + name for name in braces[2].split(",")]
