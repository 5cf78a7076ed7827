"""Run Triton kernels on a CPU in Triton's interpreter, which is chosen when Triton is imported: use a separate process.

TRITON_INTERPRET=1 pytest tests/interpreter
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs Triton's interpreter: run it separately with TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _seeded_rng() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Fill memory from `torch.empty` with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
