"""Python and packages: within the ranges that pyproject.toml accepts, and among the tested versions?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from pantheraml.base.errors import InstallationError
from pantheraml.specs import tested_versions
from pantheraml.specs.diagnosis import Check, failed, ok, skipped, warning
from pantheraml.specs.tested_versions import Versions, is_tested, known_versions

OPTIONAL = {
    "trl": "PantheraMLTrainer and TRL's trainers need it",
    "datasets": "TRL's trainers need it",
    "triton": "fused kernels on a GPU need it; torch for CUDA brings it along",
}


def check_installation() -> list[Check]:
    accepted = accepted_versions()
    packages = [check_package(tested, accepted.get(tested.package)) for tested in tested_versions.PACKAGES]
    return [check_python(platform.python_version()), *packages, check_others(accepted) if accepted else not_installed()]


def accepted_versions() -> dict[str, Requirement]:
    """Required packages with the versions that pyproject.toml accepts; empty if PantheraML is not installed."""
    try:
        texts = importlib.metadata.requires("pantheraml") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = (Requirement(text) for text in texts)
    return {each.name: each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})}


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: str) -> Check:
    if is_tested(tested_versions.PYTHON, version):
        return ok("Python", version, version=version)
    known = known_versions(tested_versions.PYTHON)
    return warning(
        "Python", f"{version}, untested: tests run with {known}", "If it fails, use one of these.", version=version
    )


def check_package(tested: Versions, accepted: Requirement | None) -> Check:
    """`accepted` None: an optional package, or any version is."""
    name, version = tested.package, installed_version(tested.package)
    if version is None:
        if name in OPTIONAL:
            return skipped(name, f"not installed: {OPTIONAL[name]}")
        return failed(name, InstallationError("not installed", fix=f"pip install '{accepted or name}'"))
    values = {"version": version}
    found = version if name != "torch" else f"{version} ({torch_build() or 'a build for CPUs'})"
    if accepted is not None and not _accepts(accepted, version):
        err = InstallationError(f"{found}, but {accepted.specifier} is needed", fix=f"pip install '{accepted}'")
        return failed(name, err, **values)
    if is_tested(tested, version):
        return ok(name, found, **values)
    return warning(
        name,
        f"{found}, untested: tests run with {known_versions(tested)}",
        f"If something fails, try: pip install '{name}=={tested.cpu or tested.gpu}'",
        **values,
    )


def check_others(accepted: dict[str, Requirement]) -> Check:
    """Check all other required packages, in one line."""
    shown = {tested.package for tested in tested_versions.PACKAGES}
    others = {name: installed_version(name) for name in accepted if name not in shown}
    bad = [name for name, version in others.items() if version is None or not _accepts(accepted[name], version)]
    if not bad:
        return ok("other packages", f"all {len(others)} required ones, in accepted versions", **others)
    found = ", ".join(f"{name} {others[name] or 'is missing'} ({accepted[name].specifier})" for name in bad)
    wanted = " ".join(f"'{accepted[name]}'" for name in bad)
    return failed("other packages", InstallationError(found, fix=f"pip install {wanted}"), **others)


def not_installed() -> Check:
    found = "unknown: PantheraML is imported from its source, without having been installed"
    return warning("other packages", found, "pip install --editable . in the source tree")


def torch_build() -> str | None:
    """'CUDA 13.0' as torch/version.py says, without importing torch; None: a build for CPUs, or no torch."""
    found = importlib.util.find_spec("torch")
    file = None if found is None or found.origin is None else Path(found.origin).with_name("version.py")
    if file is None or not file.is_file():
        return None
    match = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", file.read_text(encoding="utf-8"), re.MULTILINE)
    return None if match is None else f"CUDA {match[1]}"


def _accepts(requirement: Requirement, version: str) -> bool:
    return requirement.specifier.contains(Version(version), prereleases=True)
