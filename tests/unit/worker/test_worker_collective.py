"""The all-reduce of `pantheraml doctor`: a wrong sum and a failing collective are errors."""

from __future__ import annotations

import pytest
import torch

from pantheraml.base.errors import LaunchError
from pantheraml.parallel.process_group import World
from pantheraml.worker import collective

WORLD = World(rank=0, size=2, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "ELEMENTS", 8)


def test_the_sum_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective.dist, "all_reduce", lambda tensor: tensor.fill_(3.0))
    assert collective.all_reduce_seconds(WORLD) < 60
    monkeypatch.setattr(collective.dist, "all_reduce", lambda tensor: tensor[:6].fill_(3.0))
    with pytest.raises(LaunchError, match="wrong sum in 2 of 8 elements"):
        collective.all_reduce_seconds(WORLD)


def test_a_failure_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: torch.Tensor) -> None:
        raise RuntimeError("Timed out waiting 60000ms\nat gloo/transport")

    monkeypatch.setattr(collective.dist, "all_reduce", fail)
    with pytest.raises(LaunchError, match="Rank 0 of 2 could not all-reduce: Timed out waiting 60000ms") as err:
        collective.all_reduce_seconds(WORLD)
    assert "NCCL_DEBUG=INFO" in str(err.value.fix)
