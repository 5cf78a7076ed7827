"""Batch sizes by probing: what fits into free memory, what is fastest, and nothing of the training changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pantheraml.engine.batch_size import SAFE_SHARE, ForwardInputs, Measured, choose_size, probe_sizes


def measured(*seconds: float, bytes_per_sample: int = 100) -> list[Measured]:
    """Sizes 32, 16, 8."""
    return [Measured(32 >> i, (32 >> i) * bytes_per_sample, one) for i, one in enumerate(seconds)]


@pytest.mark.seed("S0-074", "S1-043", "S1-114", "S1-115", "S4-033", "S4-111", "S4-157")
@pytest.mark.parametrize(("free", "size"), [(10**6, 32), (3200 / SAFE_SHARE, 32), (3199, 16), (900, 7), (1, 1), (0, 1)])
def test_as_many_as_fit_into_what_is_free(free: float, size: int) -> None:
    assert choose_size(measured(0.4, 0.2, 0.1), 32, int(free))[0] == size


@pytest.mark.seed("S1-116")
def test_a_smaller_batch_only_if_it_is_clearly_faster() -> None:
    assert choose_size(measured(0.41, 0.2, 0.1), 32, 10**6)[0] == 32
    size, reason = choose_size(measured(0.8, 0.2, 0.1), 32, 10**6)
    assert size == 16
    assert "faster per sample: 80 samples/s" in reason


def test_nothing_fits() -> None:
    assert choose_size([], 32, 10**6) == (1, "no size that was tried fits")


@pytest.mark.seed("S1-013", "S1-114", "S1-116", "S4-132")
def test_a_probe_measures_and_leaves_everything_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 1))
    buffers = [buffer.clone() for buffer in model.buffers()]
    inputs = ForwardInputs((torch.randn(3, 8),), {})
    state = torch.get_rng_state()
    found = probe_sizes(model, inputs, 32)
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.size for one in found] == [32, 16, 8]
    assert all(one.seconds > 0 for one in found)
    assert found[0].bytes_used > found[1].bytes_used > found[2].bytes_used > 8 * 64 * 4
    assert all(torch.equal(now, before) for now, before in zip(model.buffers(), buffers, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
