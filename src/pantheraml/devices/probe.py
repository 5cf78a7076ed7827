"""What hardware is here: GPUs through NVML, cores and memory through psutil. Never imports torch.

A machine without an NVIDIA driver is a normal case and yields no GPUs with a note that says why. GPUs hidden by
CUDA_VISIBLE_DEVICES are left out, so that every index in the result can be used.
"""

from __future__ import annotations

from typing import Any

import psutil
import pynvml

from pantheraml.base import env
from pantheraml.specs.plan import GPU, DeviceSpec


def probe() -> DeviceSpec:
    gpus, driver, note = _probe_gpus()
    return DeviceSpec(
        gpus=tuple(gpus),
        cpu_count=len(psutil.Process().cpu_affinity()),
        ram_bytes=psutil.virtual_memory().total,
        driver=driver,
        note=note,
    )


def _probe_gpus() -> tuple[list[GPU], str | None, str | None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        return [], None, f"no NVIDIA driver: {err}"
    try:
        gpus = [_describe(index, handle) for index, handle in visible_handles()]
        note = None
        if not gpus:
            there = pynvml.nvmlDeviceGetCount() > 0
            note = "CUDA_VISIBLE_DEVICES hides every GPU" if there else "the driver shows no GPU"
        return gpus, _text(ask(pynvml.nvmlSystemGetDriverVersion)), note
    finally:
        pynvml.nvmlShutdown()


def visible_handles() -> list[tuple[int, Any]]:
    """Index and handle of the GPUs that CUDA shows, in its order; NVML has to be open."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    uuids = [_text(ask(pynvml.nvmlDeviceGetUUID, handle)) for handle in handles]
    return [(index, handles[index]) for index in visible_indices(env.visible_cuda_devices(), uuids)]


def visible_indices(variable: str | None, uuids: list[str | None]) -> list[int]:
    """The physical indices that CUDA_VISIBLE_DEVICES shows, in its order; like CUDA, it ends at the first bad entry."""
    if variable is None:
        return list(range(len(uuids)))
    shown: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            index = int(entry)
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid and uuid.startswith(entry)]
            if len(matches) != 1:
                break
            index = matches[0]
        if index in shown:
            break
        shown.append(index)
    return shown


def _describe(index: int, handle: Any) -> GPU:
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GPU(
        index=index,
        name=_text(ask(pynvml.nvmlDeviceGetName, handle)) or "unknown",
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
    )


def ask(call: Any, *arguments: Any) -> Any:
    """The answer of one NVML call, or None where this device does not support it."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
