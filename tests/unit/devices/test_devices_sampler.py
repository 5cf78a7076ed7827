"""The sampler sees the GPUs that the probe sees; on a machine without any it has nothing to tell, and says so."""

from __future__ import annotations

from pantheraml.devices.probe import probe
from pantheraml.devices.sampler import Sampler


def test_one_snapshot_for_each_gpu() -> None:
    sampler = Sampler()
    for _ in range(2):  # the probe opens and closes NVML, which stays open for the sampler
        gpus = probe().gpus
        assert [snapshot.total_bytes for snapshot in sampler.take()] == [gpu.total_bytes for gpu in gpus]
