"""Triton kernels in Triton's interpreter: on a CPU, a process of its own, since the choice is made when Triton loads.

TRITON_INTERPRET=1 pytest tests/interpreter
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs Triton's interpreter: run it by itself with TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """What `torch.empty` gives is NaN until somebody writes there."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
