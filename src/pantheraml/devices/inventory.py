"""Everything about this host's GPUs for display: identity, links, health and processes.

`probe` is what a run needs; this is what `pantheraml gpus` shows. None: not reported by the driver.
"""

from __future__ import annotations

import contextlib
import platform
import shlex

import psutil
import pynvml

from pantheraml.base.text import printable
from pantheraml.devices.health import Health, judge_once
from pantheraml.devices.nvml import NoDriverError, Nvml, ProcessOnGPU
from pantheraml.devices.probe import VisibleGPU, cpu_count, visible_gpus, why_none
from pantheraml.specs.frozen_model import FrozenModel
from pantheraml.specs.plan import GPU

COMMAND_CHARACTERS = 200


class GPUProcess(FrozenModel):
    """A process that uses a GPU. User and command are None for processes of another container or user."""

    pid: int
    memory_bytes: int | None
    user: str | None
    command: str | None


class GPUDetails(GPU):
    """One visible GPU."""

    uuid: str | None
    pci_bus_id: str | None
    pcie: tuple[int, int] | None
    """Generation and lanes, at most."""
    numa_node: int | None
    ecc: bool | None
    mig: bool | None
    """Divided into MIG instances."""
    nvlinks: tuple[int, int] | None
    """Active and all; None: it has none, or does not report it."""
    power_limit_watts: float | None
    max_sm_clock_mhz: int | None
    thermal_margin: int | None
    """Degrees below the temperature at which it slows down."""
    health: Health
    processes: list[GPUProcess] | None


class Inventory(FrozenModel):
    """This host."""

    host: str
    driver: str | None
    cuda: str | None
    """Newest CUDA version that the driver supports."""
    gpus: tuple[GPUDetails, ...]
    connections: tuple[tuple[str | None, ...], ...]
    """How the GPUs in row and column reach each other: NVLink, or the closest point on PCIe that they share."""
    cpu_count: int
    ram_bytes: int
    ram_available_bytes: int
    note: str | None
    """Why there is no GPU; None if there are any."""


def take_inventory() -> Inventory:
    try:
        session = Nvml()
    except NoDriverError as err:
        return _inventory((), (), note=str(err))
    with session:
        visible = visible_gpus(session)
        gpus = tuple(_details(each) for each in visible)
        connections = tuple(tuple(None if a is b else a.gpu.connection(b.gpu) for b in visible) for a in visible)
        note = None if gpus else why_none(session)
        return _inventory(gpus, connections, note=note, driver=session.driver(), cuda=session.cuda())


def _inventory(
    gpus: tuple[GPUDetails, ...],
    connections: tuple[tuple[str | None, ...], ...],
    *,
    note: str | None,
    driver: str | None = None,
    cuda: str | None = None,
) -> Inventory:
    memory = psutil.virtual_memory()
    return Inventory(
        host=platform.node(),
        driver=driver,
        cuda=cuda,
        gpus=gpus,
        connections=connections,
        cpu_count=cpu_count(),
        ram_bytes=memory.total,
        ram_available_bytes=memory.available,
        note=note,
    )


def _details(visible: VisibleGPU) -> GPUDetails:
    gpu, device = visible.gpu, visible.device
    memory, links, processes = device.memory(), gpu.nvlinks(), device.processes()
    return GPUDetails(
        index=visible.index,
        name=device.name() or "unknown",
        total_bytes=None if memory is None else memory[0],
        free_bytes=None if memory is None else memory[1],
        compute_capability=device.capability(),
        mig_uuid=visible.mig_uuid,
        uuid=device.uuid(),
        pci_bus_id=gpu.pci_bus_id(),
        pcie=gpu.pcie(),
        numa_node=gpu.numa_node(),
        ecc=gpu.ecc_enabled(),
        mig=gpu.mig_enabled(),
        nvlinks=None if links is None else (links.active, links.active + links.inactive),
        power_limit_watts=gpu.power_limit_watts(),
        max_sm_clock_mhz=gpu.max_clock_mhz(pynvml.NVML_CLOCK_SM),
        thermal_margin=gpu.thermal_margin(),
        health=judge_once(gpu),
        processes=None if processes is None else [_owned(each) for each in processes],
    )


def _owned(process: ProcessOnGPU) -> GPUProcess:
    user = command = None
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid)
        user = found.username()
        command = printable(shlex.join(found.cmdline()))[:COMMAND_CHARACTERS] or found.name()
    return GPUProcess(pid=process.pid, memory_bytes=process.memory_bytes, user=user, command=command)
