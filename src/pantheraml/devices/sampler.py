"""Current memory use and utilization of the GPUs, through NVML. Never imports torch.

Cheap enough to call at every step: NVML is initialized once per process, which takes far longer than a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import pynvml

from pantheraml.devices.probe import query, visible_handles


@dataclass(frozen=True)
class GPUSnapshot:
    """Driver readings of one GPU; None: not supported by the driver."""

    total_bytes: int | None
    free_bytes: int | None
    """Memory not used by any process."""
    utilization_percent: int | None
    """Share of the last sampling period in which a kernel was running."""


class GPUSampler:
    def __init__(self) -> None:
        """Open NVML; without a driver there are no GPUs to sample."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            self._handles = []
        else:
            self._handles = [handle for _, handle in visible_handles()]

    def take(self) -> list[GPUSnapshot]:
        """Return one snapshot per GPU visible to CUDA, in CUDA's order."""
        snapshots = []
        for handle in self._handles:
            memory, rates = (
                query(pynvml.nvmlDeviceGetMemoryInfo, handle),
                query(pynvml.nvmlDeviceGetUtilizationRates, handle),
            )
            snapshots.append(
                GPUSnapshot(
                    total_bytes=None if memory is None else int(memory.total),
                    free_bytes=None if memory is None else int(memory.free),
                    utilization_percent=None if rates is None else int(rates.gpu),
                )
            )
        return snapshots
