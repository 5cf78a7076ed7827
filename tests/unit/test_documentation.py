"""Generated documents are up to date, and links and named files exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.seed_blocks import adapted, read_blocks

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
]


def test_configuration_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("generate_configuration", ROOT / "docs/generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/configuration.md").read_text() == module.render(), "run: python docs/generate_configuration.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    if page.name == "conformance.md":  # quotes the names of files in the product documents
        return
    for named in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / named).exists(), named


def test_readme_layout_matches_the_source_tree() -> None:
    listed = set(re.findall(r"^    (\w+)/ ", (ROOT / "README.md").read_text(), re.MULTILINE))
    present = {p.name for p in (ROOT / "src/pantheraml").iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert listed == present


def test_readme_and_trl_page_show_the_same_code() -> None:
    shown, run = (
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        for page in ("README.md", "docs/trl.md")
    )
    assert len(run) == 1
    assert shown == run


def test_make_test_all_runs_every_test() -> None:
    """Two halves by a marker, and the interpreter's folder in a process of its own."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    makefile = (ROOT / "Makefile").read_text()
    assert "\ntest-all: test test-rest\n" in makefile
    assert re.findall(r"\$\(PYTEST\) -m (\"not extended\"|extended) ", makefile) == ['"not extended"', "extended"]
    run = {*settings["testpaths"], *re.findall(r"TRITON_INTERPRET=1 \$\(PYTEST\) (\S+)", makefile)}
    present = {
        f"tests/{found.parent.relative_to(ROOT / 'tests').parts[0]}" for found in ROOT.glob("tests/*/**/test_*.py")
    }
    assert run == present


def requirements(*groups: str) -> dict[str, SpecifierSet]:
    """Versions of dependencies, and of those of extras."""
    listed = [*PROJECT["dependencies"], *(line for group in groups for line in PROJECT["optional-dependencies"][group])]
    return {(one := Requirement(line)).name: one.specifier for line in listed}


@pytest.mark.seed("S3:34", "S3-011", "S3-012")
def test_optional_packages_are_extras() -> None:
    for line in read_blocks()["S3:34"].splitlines():
        if line.startswith("pip install "):
            name = line.removeprefix("pip install ")
            assert name in requirements(name)


@pytest.mark.seed("S3:15", "S3-007", "S3-008")
def test_required_packages_are_dependencies() -> None:
    """The command of the README brings all that the block installs."""
    lines = [line.partition("#")[0].split() for line in adapted("S3:15").splitlines()]
    named = {word.lower() for line in lines if line for word in line[2:]}
    assert named == {"torch", "transformers", "datasets", "accelerate", "psutil", "pyyaml"}
    (command,) = re.findall(r"^    pip install \. (.*?) *#", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert named <= set(requirements()) | {Requirement(word.strip("'")).name for word in command.split()}


@pytest.mark.seed("S0-118", "S0-119", "S0-120", "S0-121")
def test_contributing_says_how_to_test_on_several_gpus() -> None:
    (part,) = re.findall(r"\*\*Several GPUs\.\*\* (.*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    for words in ("`make gpu-test`", "which configurations ran", "single GPU must work as before", "Document a new"):
        assert words in " ".join(part.split())


@pytest.mark.seed("S2-075")
def test_parallelism_page_explains_the_ddp_fix() -> None:
    text = " ".join((ROOT / "docs/parallelism.md").read_text().split())
    assert "Expected to mark a variable ready only once" in text
    assert "`torchrun --nproc_per_node=2 tests/test_ddp_fix.py`" in text
