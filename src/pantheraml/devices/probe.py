"""Detect hardware: GPUs through NVML, cores and memory through psutil. Never imports torch.

Without an NVIDIA driver the result has no GPUs, and a note with the reason. GPUs hidden by CUDA_VISIBLE_DEVICES are
left out, so every index in the result is usable.
"""

from __future__ import annotations

from typing import Any

import psutil
import pynvml

from pantheraml.base import env
from pantheraml.specs.plan import GPU, DeviceSpec


def probe() -> DeviceSpec:
    return DeviceSpec(
        **_probe_gpus(),
        cpu_count=len(psutil.Process().cpu_affinity()),
        ram_bytes=psutil.virtual_memory().total,
    )


def _probe_gpus() -> dict[str, Any]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as err:
        return {"gpus": (), "driver": None, "note": f"no NVIDIA driver: {err}"}
    try:
        gpus = [_describe(index, handle) for index, handle in visible_handles()]
        note = None
        if not gpus:
            hidden = pynvml.nvmlDeviceGetCount() > 0
            note = "CUDA_VISIBLE_DEVICES hides every GPU" if hidden else "the driver reports no GPU"
        driver = {"driver": _text(query(pynvml.nvmlSystemGetDriverVersion)), "driver_cuda": _driver_cuda()}
        return {"gpus": tuple(gpus), "note": note, **driver}
    finally:
        pynvml.nvmlShutdown()


def _driver_cuda() -> str | None:
    number = query(pynvml.nvmlSystemGetCudaDriverVersion)
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def visible_handles() -> list[tuple[int, Any]]:
    """Index and NVML handle of the GPUs visible to CUDA, in CUDA's order; NVML must be initialized."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    uuids = [_text(query(pynvml.nvmlDeviceGetUUID, handle)) for handle in handles]
    return [(index, handles[index]) for index in visible_indices(env.visible_cuda_devices(), uuids)]


def visible_indices(variable: str | None, uuids: list[str | None]) -> list[int]:
    """Physical indices selected by CUDA_VISIBLE_DEVICES, in its order; like CUDA, stop at the first invalid entry."""
    if variable is None:
        return list(range(len(uuids)))
    visible: list[int] = []
    for entry in (part.strip() for part in variable.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            index = int(entry)
        else:
            matches = [i for i, uuid in enumerate(uuids) if entry and uuid and uuid.startswith(entry)]
            if len(matches) != 1:
                break
            index = matches[0]
        if index in visible:
            break
        visible.append(index)
    return visible


def _describe(index: int, handle: Any) -> GPU:
    memory = query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = query(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    return GPU(
        index=index,
        name=_text(query(pynvml.nvmlDeviceGetName, handle)) or "unknown",
        total_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
    )


def query(call: Any, *arguments: Any) -> Any:
    """Return the result of an NVML call, or None if the device does not support it."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value
