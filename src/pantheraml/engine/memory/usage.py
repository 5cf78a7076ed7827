"""Memory of the host and of this process's GPUs, for custom loops: what is used, and freeing what is cached."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch

from pantheraml.base import log

logger = log.get_manager()

MIB = 2**20
HIGH_PERCENT = 80.0
"""Host memory above which `optimize_memory` frees caches without being forced."""


def max_reserved_bytes(device: torch.device) -> int | None:
    """Most that torch's allocator held of a GPU since the process began; None for a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


class MemoryManager:
    def get_memory_usage(self) -> dict[str, Any]:
        """Return MiB and percent of the host, of this process, and of what torch holds on each GPU."""
        host, process = psutil.virtual_memory(), psutil.Process()
        gpus = [
            {
                "device": index,
                "allocated_mb": torch.cuda.memory_allocated(index) / MIB,
                "reserved_mb": torch.cuda.memory_reserved(index) / MIB,
            }
            for index in range(torch.cuda.device_count())
        ]
        return {
            "system_percent": host.percent,
            "system_used_mb": host.used / MIB,
            "system_available_mb": host.available / MIB,
            "system_total_mb": host.total / MIB,
            "process_mb": process.memory_info().rss / MIB,
            "gpus": gpus,
        }

    def optimize_memory(self, force: bool = False) -> dict[str, Any]:
        """Collect garbage and return cached GPU memory to the driver; unless `force`, only if the host is 80 % full."""
        before = self.get_memory_usage()
        if not force and before["system_percent"] <= HIGH_PERCENT:
            return {"freed": False, "freed_mb": 0.0, "freed_gpu_mb": 0.0}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        after = self.get_memory_usage()
        reserved = [sum(gpu["reserved_mb"] for gpu in usage["gpus"]) for usage in (before, after)]
        freed = {
            "freed": True,
            "freed_mb": before["process_mb"] - after["process_mb"],
            "freed_gpu_mb": reserved[0] - reserved[1],
        }
        logger.debug("optimize_memory: %.1f MB of the host, %.1f MB of GPUs", freed["freed_mb"], freed["freed_gpu_mb"])
        return freed


def free_bytes(device: torch.device) -> int:
    """Return what this process can still allocate on `device`, with what torch has cached there."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
