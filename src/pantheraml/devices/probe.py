"""Detect hardware: GPUs through NVML, cores and memory through psutil. Never imports torch.

Without an NVIDIA driver the result has no GPUs, and a note with the reason. GPUs hidden by CUDA_VISIBLE_DEVICES are
left out, so every index in the result is usable. CUDA can use one MIG instance per process, and none beside whole GPUs:
an instance is reported only if CUDA_VISIBLE_DEVICES names it, or if every visible GPU is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from pantheraml.base import env
from pantheraml.devices.nvml import NoDriverError, Nvml, NvmlDevice
from pantheraml.specs.plan import GPU, DeviceSpec


@dataclass(frozen=True)
class VisibleGPU:
    """A GPU that CUDA shows to this process, or the MIG instance that it shows of it."""

    index: int
    gpu: NvmlDevice
    instance: NvmlDevice | None = None

    @property
    def device(self) -> NvmlDevice:
        return self.instance or self.gpu

    @property
    def mig_uuid(self) -> str | None:
        return None if self.instance is None else self.instance.uuid()


def probe() -> DeviceSpec:
    return DeviceSpec(**_probe_gpus(), cpu_count=cpu_count(), ram_bytes=psutil.virtual_memory().total)


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(usable_cores())


def usable_cores() -> list[int]:
    """Their numbers."""
    return sorted(psutil.Process().cpu_affinity())


def _probe_gpus() -> dict[str, Any]:
    try:
        session = Nvml()
    except NoDriverError as err:
        return {"gpus": (), "driver": None, "note": str(err)}
    with session:
        gpus = tuple(_describe(each) for each in visible_gpus(session))
        note = None if gpus else why_none(session)
        return {"gpus": gpus, "note": note, "driver": session.driver(), "driver_cuda": session.cuda()}


def why_none(session: Nvml) -> str:
    """Why no GPU is visible, although there is a driver."""
    return "CUDA_VISIBLE_DEVICES hides every GPU" if session.devices() else "the driver reports no GPU"


def visible_gpus(session: Nvml) -> list[VisibleGPU]:
    """Return the GPUs visible to CUDA, in CUDA's order."""
    devices, variable = session.devices(), env.visible_cuda_devices()
    if variable is not None and variable.strip().startswith("MIG-"):
        return _named_instance(devices, variable.partition(",")[0].strip())
    visible = visible_indices(variable, [device.uuid() for device in devices])
    whole = [VisibleGPU(index, devices[index]) for index in visible if not devices[index].mig_enabled()]
    if whole:
        return whole
    instances = (
        VisibleGPU(index, devices[index], each) for index in visible for each in devices[index].mig_instances()
    )
    return [first] if (first := next(instances, None)) is not None else []


def _named_instance(devices: Sequence[NvmlDevice], name: str) -> list[VisibleGPU]:
    """CUDA shows the first instance that the variable names, and no other."""
    found = [
        VisibleGPU(index, device, instance)
        for index, device in enumerate(devices)
        if device.mig_enabled()
        for instance in device.mig_instances()
        if (instance.uuid() or "").startswith(name)
    ]
    return found if len(found) == 1 else []


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


def _describe(visible: VisibleGPU) -> GPU:
    memory = visible.device.memory()
    return GPU(
        index=visible.index,
        name=visible.device.name() or "unknown",
        total_bytes=None if memory is None else memory[0],
        free_bytes=None if memory is None else memory[1],
        compute_capability=visible.device.capability(),
        mig_uuid=visible.mig_uuid,
    )
