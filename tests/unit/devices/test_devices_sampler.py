"""The sampler sees the same GPUs as the probe; none without a driver."""

from __future__ import annotations

import pytest

from pantheraml.devices.probe import probe
from pantheraml.devices.sampler import GPUSampler


@pytest.mark.seed("C16")
def test_one_snapshot_for_each_gpu() -> None:
    sampler = GPUSampler()
    for _ in range(2):  # the probe initializes and shuts down NVML, which must stay open for the sampler
        gpus = probe().gpus
        assert [snapshot.total_bytes for snapshot in sampler.take()] == [gpu.total_bytes for gpu in gpus]
