"""Shared by all unit tests: seed the RNGs, so that results do not depend on which tests ran before; a fake driver."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pantheraml.devices import nvml
from pantheraml.devices.fake_nvml import FakeNvml


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNvml]:
    """Return a function that puts the driver of a described host in place of this one's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(cluster: str, **options: Any) -> FakeNvml:
        fake = FakeNvml(cluster, **options)
        monkeypatch.setattr(nvml, "binding", fake)
        return fake

    return make


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _seed_module_fixtures() -> None:
    _seed()


@pytest.fixture(autouse=True)
def _seed_each_test() -> None:
    _seed()
