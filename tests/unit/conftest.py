"""Shared by all unit tests: seed the RNGs, so that results do not depend on which tests ran before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch


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
