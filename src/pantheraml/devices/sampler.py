"""How busy and how full the GPUs are at this moment, through NVML. Never imports torch.

Made to be asked in every step: NVML is opened once and stays open as long as the process lives, for opening it takes
far longer than asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import pynvml

from pantheraml.devices.probe import ask, visible_handles


@dataclass(frozen=True)
class GPUSnapshot:
    """What the driver does not tell is None."""

    total_bytes: int | None
    free_bytes: int | None
    """Of what no process has taken."""
    utilisation_percent: int | None
    """Of the last moments in which some kernel ran."""


class Sampler:
    def __init__(self) -> None:
        """Without a driver there is nothing to sample."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            self._handles = []
        else:
            self._handles = [handle for _, handle in visible_handles()]

    def take(self) -> list[GPUSnapshot]:
        """One for each GPU that CUDA shows this process, in CUDA's order."""
        found = []
        for handle in self._handles:
            memory, rates = (
                ask(pynvml.nvmlDeviceGetMemoryInfo, handle),
                ask(pynvml.nvmlDeviceGetUtilizationRates, handle),
            )
            found.append(
                GPUSnapshot(
                    total_bytes=None if memory is None else int(memory.total),
                    free_bytes=None if memory is None else int(memory.free),
                    utilisation_percent=None if rates is None else int(rates.gpu),
                )
            )
        return found
