"""The versions that PantheraML is tested with: the only place that lists them.

`pantheraml doctor` compares an installation with this table, and `docs/generate_tested_versions.py` prints it in the
documentation. A test compares it with the lock files of the CPU tests and with the newest result measured on a GPU.
Which versions are accepted is a different question: the dependencies in pyproject.toml answer it.
"""

from __future__ import annotations

from typing import NamedTuple


class Versions(NamedTuple):
    """Versions of one package; None: the tests run without it."""

    package: str
    cpu: str | None
    """In the CPU tests, which run for every commit."""
    gpu: str | None
    """In the tests and measurements on a GPU."""


PYTHON = Versions("Python", "3.11", "3.12")
PACKAGES = (
    Versions("torch", "2.13.0", "2.11.0"),
    Versions("transformers", "5.22.2", "5.17.0"),
    Versions("peft", "0.21.2", "0.21.0"),
    Versions("trl", "1.16.0", "1.15.0"),
    Versions("datasets", "5.2.0", "4.8.5"),
    Versions("triton", "3.7.1", "3.6.0"),
)
GPU = "NVIDIA H200"
DRIVER = "580.159.04"

LEAST_CAPABILITY = (7, 0)
"""Older GPUs have no tensor cores, and Triton has no code for them."""


def series(version: str) -> str:
    """'2.13.0+cpu' -> '2.13': patch releases count as tested, too."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def is_tested(tested: Versions, version: str) -> bool:
    return series(version) in {series(known) for known in (tested.cpu, tested.gpu) if known is not None}


def known_versions(tested: Versions) -> str:
    """'2.11.0 and 2.13.0'."""
    return " and ".join(known for known in (tested.gpu, tested.cpu) if known is not None)
