"""Write the table of tested versions into the Multi-GPU guide, and its short form into the README.

    python docs/generate_tested_versions.py

The versions are in `pantheraml.specs.tested_versions`, the accepted ranges in pyproject.toml. A test fails if the pages
are not up to date.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from pantheraml.specs import tested_versions
from pantheraml.specs.tested_versions import Versions, series

ROOT = Path(__file__).parents[1]
NAMES = {"trl": "TRL"}


def accepted() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    found = {each.name: str(each.specifier) for each in map(Requirement, texts)}
    return {"Python": project["requires-python"], **found}


def table() -> str:
    """For the guide."""
    ranges = accepted()
    lines = [
        f"| package | CPU tests, every commit | tests on one {tested_versions.GPU} | accepted |",
        "|---|---|---|---|",
    ]
    for each in (tested_versions.PYTHON, *tested_versions.PACKAGES):
        name = NAMES.get(each.package, each.package)
        lines.append(f"| {name} | {each.cpu or '–'} | {each.gpu or '–'} | {ranges.get(each.package, 'any')} |")
    lines.append(f"| NVIDIA driver | – | {tested_versions.DRIVER} | as torch's CUDA needs |")
    return "\n".join(lines)


def sentence() -> str:
    """For the README."""
    shown = [
        each
        for each in (tested_versions.PYTHON, *tested_versions.PACKAGES)
        if each.package not in ("datasets", "triton")
    ]

    def versions(column: str) -> str:
        return ", ".join(f"{NAMES.get(each.package, each.package)} {series(version(each, column))}" for each in shown)

    text = (
        f"Tested with {versions('cpu')} on CPUs, and with {versions('gpu')} on one {tested_versions.GPU}"
        " ([all versions](docs/Multi-GPU-Guide.md#requirements)); `pantheraml doctor` compares yours."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def version(each: Versions, column: str) -> str:
    return str(getattr(each, column))


def render(page: Path, content: str) -> str:
    """The page with `content` between its markers."""
    text, count = re.subn(
        r"(<!-- tested: begin -->\n).*?(<!-- tested: end -->)",
        lambda match: f"{match[1]}{content}\n{match[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    assert count == 1, page
    return text


PAGES = {ROOT / "docs/Multi-GPU-Guide.md": table, ROOT / "README.md": sentence}

if __name__ == "__main__":
    for page, content in PAGES.items():
        page.write_text(render(page, content()))
