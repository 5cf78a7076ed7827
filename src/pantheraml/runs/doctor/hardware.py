"""Driver, GPUs, memory, disk space and environment variables, before anything is started on them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from pantheraml.base import env
from pantheraml.base.errors import DeviceError, StorageError
from pantheraml.devices.probe import probe
from pantheraml.readers.number_format import size
from pantheraml.runs.doctor.installation import torch_build
from pantheraml.specs import tested_versions
from pantheraml.specs.diagnosis import Check, failed, ok, skipped, warning
from pantheraml.specs.plan import GPU, DeviceSpec

LEAST_BYTES = 1 << 30
"""Minimum free space for a run: a checkpoint is as large as what is trained."""
FEW_BYTES = 20 << 30
"""Free space below which a model of a few billion parameters may not fit."""
BUSY_SHARE = 0.8
"""A GPU with less than this share of its memory free is used by someone else."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 1 << 30
"""NCCL's ranks on one host exchange data there; Docker gives 64 MiB by default."""


def check_hardware() -> list[Check]:
    devices = probe()
    checks = [check_driver(devices, torch_build()), *check_gpus(devices.gpus), check_host(devices)]
    if len(devices.gpus) > 1:
        checks.append(check_shared_memory(SHARED_MEMORY))
    places = {"current folder": Path.cwd(), "cache": env.cache_root(), "temporary files": Path(tempfile.gettempdir())}
    return [*checks, *check_disks(places), check_environment()]


def check_driver(devices: DeviceSpec, build: str | None) -> Check:
    """`build`: the CUDA version that torch is built for, as `torch_build` gives it."""
    values = {"driver": devices.driver, "driver_cuda": devices.driver_cuda}
    if devices.driver is None:
        fix = (
            "Nothing, if this host has no GPU: runs use the CPU. Otherwise install NVIDIA's driver until `nvidia-smi`"
            " lists the GPUs; a container needs `docker run --gpus all`."
        )
        return warning("driver", devices.note or "no NVIDIA driver", fix, **values)
    found = f"{devices.driver}, for CUDA up to {devices.driver_cuda or 'an unknown version'}"
    if devices.gpus and build is None:
        err = DeviceError(
            f"{found}, but torch is a build for CPUs", fix="pip install --force-reinstall torch, in a build for CUDA"
        )
        return failed("driver", err, **values)
    if devices.driver_cuda is not None and build is not None and _major(devices.driver_cuda) < _major(build):
        err = DeviceError(
            f"{found}, but torch is built for {build}",
            fix=f"Update the driver, or install a torch built for CUDA {devices.driver_cuda} or older.",
        )
        return failed("driver", err, **values)
    return ok("driver", found, **values)


def check_gpus(gpus: Sequence[GPU]) -> list[Check]:
    if not gpus:
        given = env.visible_cuda_devices()
        if given is None:
            return [skipped("GPUs", "none: runs use the CPU")]
        fix = "Unset CUDA_VISIBLE_DEVICES, or name GPUs of `nvidia-smi -L`."
        return [warning("GPUs", f"none is visible with CUDA_VISIBLE_DEVICES={given!r}", fix)]
    kinds = Counter((gpu.name, size(gpu.total_bytes), _capability(gpu)) for gpu in gpus)
    found = "; ".join(
        f"{count} x {name}, {memory}, compute capability {version}" for (name, memory, version), count in kinds.items()
    )
    values = {"gpus": [gpu.model_dump(mode="json") for gpu in gpus]}
    old = [gpu for gpu in gpus if (gpu.compute_capability or (99, 0)) < tested_versions.LEAST_CAPABILITY]
    if old:
        least = ".".join(map(str, tested_versions.LEAST_CAPABILITY))
        err = DeviceError(
            f"{found}; GPU {old[0].index} is too old: compute capability {least} or newer is needed",
            fix="Hide it with CUDA_VISIBLE_DEVICES, or train on newer GPUs.",
        )
        return [failed("GPUs", err, **values)]
    if len(kinds) > 1:
        fix = (
            "Ranks wait for the slowest GPU, and the smallest decides the micro-batch: choose equal ones with"
            " CUDA_VISIBLE_DEVICES, or set parallel.batch_shares=adaptive."
        )
        return [warning("GPUs", found, fix, **values), *_busy(gpus)]
    return [ok("GPUs", found, **values), *_busy(gpus)]


def _busy(gpus: Sequence[GPU]) -> list[Check]:
    return [
        warning(
            f"GPU {gpu.index}",
            f"only {size(gpu.free_bytes)} of {size(gpu.total_bytes)} are free",
            "`nvidia-smi` lists the processes that use it: end them, or leave this GPU out with CUDA_VISIBLE_DEVICES.",
        )
        for gpu in gpus
        if gpu.free_bytes is not None and gpu.total_bytes and gpu.free_bytes < BUSY_SHARE * gpu.total_bytes
    ]


def check_host(devices: DeviceSpec) -> Check:
    free = psutil.virtual_memory().available
    found = f"{devices.cpu_count} CPU cores, {size(free)} of {size(devices.ram_bytes)} RAM free"
    return ok("host", found, cpu_count=devices.cpu_count, ram_bytes=devices.ram_bytes, ram_free_bytes=free)


def check_shared_memory(place: Path) -> Check:
    if not place.is_dir():
        return skipped("shared memory", f"there is no {place}")
    total = shutil.disk_usage(place).total
    if total >= SHARED_BYTES:
        return ok("shared memory", f"{size(total)} in {place}", bytes=total)
    fix = "Start the container with `--ipc=host` or `--shm-size=8g`."
    return warning("shared memory", f"only {size(total)} in {place}, which NCCL needs", fix, bytes=total)


def check_disks(places: dict[str, Path]) -> list[Check]:
    return [check_disk(name, path) for name, path in places.items()]


def check_disk(name: str, path: Path) -> Check:
    """Check that `path`, or the folder in which it would be created, is writable and has space."""
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = {
            "current folder": "Nothing, if you pass --output with a folder of your own.",
            "cache": "Set PANTHERAML_CACHE to a folder of your own.",
        }.get(name, "Set TMPDIR to a folder of your own.")
        return warning(name, f"{folder} cannot be written to", fix)
    free = shutil.disk_usage(folder).free
    found = f"{size(free)} free in {path}"
    if free < LEAST_BYTES:
        err = StorageError(f"only {found}", fix="Make room, or use another disk (--output, PANTHERAML_CACHE, TMPDIR).")
        return failed(name, err, free_bytes=free)
    if free < FEW_BYTES:
        fix = "Enough for small models and for adapters; full checkpoints take 12 bytes per parameter or more."
        return warning(name, f"only {found}", fix, free_bytes=free)
    return ok(name, found, free_bytes=free)


def check_environment() -> Check:
    """List environment variables that change what a run does, as a reminder."""
    given = env.settings_in_environment()
    if not given:
        return ok("environment", "no variable changes what runs do")
    return ok("environment", ", ".join(f"{name}={value}" for name, value in given.items()), **given)


def _capability(gpu: GPU) -> str:
    return "unknown" if gpu.compute_capability is None else ".".join(map(str, gpu.compute_capability))


def _major(version: str) -> int:
    return int(version.removeprefix("CUDA ").partition(".")[0])
