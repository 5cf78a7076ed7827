"""The table of tested versions: what the CPU tests install, what the GPU results were measured with, what docs show."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
from pathlib import Path
from types import ModuleType

import pytest

from pantheraml.specs import tested_versions
from pantheraml.specs.tested_versions import is_tested, known_versions, series

ROOT = Path(__file__).parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_tested_versions", ROOT / "docs/generate_tested_versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.seed(
    "C19",
    "S2-077",
    "S2-078",
)
def test_pages_show_the_table() -> None:
    module = generator()
    for page, content in module.PAGES.items():
        assert page.read_text() == module.render(page, content()), "run: python docs/generate_tested_versions.py"


@pytest.mark.seed("C19")
def test_cpu_versions_are_those_of_the_locks() -> None:
    locks = "".join((ROOT / name).read_text() for name in ("requirements.lock", "requirements-dev.lock"))
    locked = dict(re.findall(r"^([\w.-]+)==([\w.]+)", locks, re.MULTILINE))
    assert {each.package: each.cpu for each in tested_versions.PACKAGES} == {
        each.package: locked[each.package] for each in tested_versions.PACKAGES
    }
    assert is_tested(tested_versions.PYTHON, platform.python_version())


def test_gpu_versions_are_those_of_the_newest_result() -> None:
    newest = json.loads(max((ROOT / "benchmarks/results").glob("h200-*.json")).read_text())
    versions = newest["versions"]
    assert {each.package: each.gpu for each in tested_versions.PACKAGES} == {
        each.package: versions[each.package] for each in tested_versions.PACKAGES
    }
    assert series(versions["python"]) == tested_versions.PYTHON.gpu
    assert newest["hardware"]["driver"] == tested_versions.DRIVER
    assert newest["hardware"]["gpus"] == [tested_versions.GPU]


def test_series() -> None:
    torch = tested_versions.PACKAGES[0]
    assert series("2.13.0+cu130") == "2.13"
    assert known_versions(torch) == f"{torch.gpu} and {torch.cpu}"
    assert not is_tested(torch, "2.1.0")


@pytest.mark.seed("S3-006", "S3-080")
def test_install_commands() -> None:
    """Both pages say how to install; what the commands of older documents name comes along, or is named."""
    dependencies = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
    assert {"torch", "transformers", "accelerate", "psutil", "pyyaml"} <= set(re.findall(r'"([\w-]+)', dependencies))
    guide = (ROOT / "docs/Multi-GPU-Guide.md").read_text()
    assert re.findall(r"^    pip install ([^#\n]*?) *#", guide, re.MULTILINE) == ["torch", ".", "'trl>=1.15' datasets"]
    assert "    pip install . 'trl>=1.15' datasets " in (ROOT / "README.md").read_text()
