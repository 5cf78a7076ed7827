"""Shared by all unit tests: random numbers that do not hang on which tests ran before in the same process."""

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
def _same_numbers_for_what_a_file_shares() -> None:
    _seed()


@pytest.fixture(autouse=True)
def _same_numbers_for_each_test() -> None:
    _seed()
