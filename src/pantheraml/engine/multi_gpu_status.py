"""Status of a custom training loop: memory and utilization of the devices, forward passes, time spent communicating.

Readings come from the driver and from counters, so a status is cheap enough for every step: nothing waits for a GPU.
"""

from __future__ import annotations

import time
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pantheraml.devices.sampler import GPUSampler, GPUSnapshot
from pantheraml.engine.batch_size import ForwardInputs
from pantheraml.engine.memory.usage import MIB
from pantheraml.specs.multi_gpu import MultiGPUConfig


class Monitor:
    """With `enable_multi_gpu_monitoring=False`, it asks no driver and counts nothing."""

    def __init__(self, config: MultiGPUConfig) -> None:
        self._config = config
        self._on = config.enable_multi_gpu_monitoring
        self._sampler = GPUSampler() if self._on else None
        self.forget()

    def forget(self) -> None:
        self._model: nn.Module | None = None
        self.inputs: ForwardInputs | None = None
        """Arguments of the newest training forward."""
        self._forwards, self._samples = 0, 0
        self._times: tuple[float, float] | None = None

    def watch(self, model: nn.Module) -> None:
        self.forget()
        self._model = model

    def saw(self, inputs: ForwardInputs) -> None:
        self.inputs = inputs
        if not self._on:
            return
        now = time.perf_counter()
        if self._times is not None:
            self._samples += inputs.rows or 0
        self._times = (now if self._times is None else self._times[0], now)
        self._forwards += 1

    def devices(self) -> dict[str, Any]:
        snapshots = [] if self._sampler is None else self._sampler.take()
        used = [index for index in self._config.device_ids or range(len(snapshots)) if index < len(snapshots)]
        self._utilization = [snapshots[index].utilization_percent for index in used]
        host = psutil.virtual_memory()
        return {
            "device_count": len(used) if self._on else torch.cuda.device_count(),
            "gpu_memory": [_memory(index, snapshots[index]) for index in used],
            "host_memory": {
                "device": "cpu",
                "allocated_mb": psutil.Process().memory_info().rss / MIB,
                "free_mb": host.available / MIB,
                "total_mb": host.total / MIB,
            },
        }

    def training(self) -> dict[str, Any]:
        """Return the statistics; `devices` takes the readings."""
        seconds = 0.0 if self._times is None else self._times[1] - self._times[0]
        return {
            "gpu_utilization": self._utilization if self._on else None,
            "forward_passes": self._forwards if self._on else None,
            "samples_per_second": self._samples / seconds if self._samples and seconds else None,
            "communication": self._communication(),
        }

    def _communication(self) -> dict[str, float] | None:
        """DDP's own timing, averaged over the iterations that it samples (the first ten, then every hundredth)."""
        if not self._on or not isinstance(self._model, DistributedDataParallel):
            return None
        times = self._model._get_ddp_logging_data()
        names = {
            "backward_ms": "avg_backward_compute_time",
            "communication_ms": "avg_backward_comm_time",
            "overlap_ms": "avg_backward_compute_comm_overlap_time",
        }
        if not all(times.get(name) for name in names.values()):
            return None
        found = {ours: times[name] / 1e6 for ours, name in names.items()}
        return {**found, "exposed_ms": max(0.0, found["communication_ms"] - found["overlap_ms"])}


def _memory(index: int, snapshot: GPUSnapshot) -> dict[str, Any]:
    free, total = snapshot.free_bytes, snapshot.total_bytes
    if free is None or total is None:  # not reported by some drivers (MIG, integrated GPUs)
        free, total = torch.cuda.mem_get_info(index)
    return {
        "device": index,
        "allocated_mb": torch.cuda.memory_allocated(index) / MIB,
        "free_mb": free / MIB,
        "total_mb": total / MIB,
    }
