"""Measure the rates of this machine's devices in a process with torch, and store them for the planner."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from pantheraml.base.errors import DeviceError
from pantheraml.base.folders import storage_errors, write_text
from pantheraml.base.private import private_folder
from pantheraml.devices.probe import probe
from pantheraml.launch.local import worker_environment
from pantheraml.launch.script import python_module
from pantheraml.planner.rates import MachineRates, rates_as_json, rates_file

TIMEOUT_SECONDS = 300.0


def calibrate(*, cpu: bool = False, seconds: float = 1.0) -> Iterator[tuple[MachineRates, Path]]:
    """Yield the stored rates and their file for one GPU of each model, or for the CPU if there is no GPU.

    `seconds`: for each of the measurements.
    """
    gpus = () if cpu else probe().gpus
    firsts = {gpu.name: position for position, gpu in reversed(list(enumerate(gpus)))}
    for device, name in [(f"cuda:{position}", name) for name, position in firsts.items()] or [("cpu", "cpu")]:
        rates = _measured(device, seconds).model_copy(update={"device": name})
        path = rates_file(name)
        with storage_errors(path):
            private_folder(path.parent)
        write_text(path, rates_as_json(rates))
        yield rates, path


def _measured(device: str, seconds: float) -> MachineRates:
    command = [*python_module("pantheraml.worker.calibrate"), device, str(seconds)]
    environment = {**worker_environment(None), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # the numbering of NVML
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise DeviceError(
            f"{device} was not measured within {TIMEOUT_SECONDS:.0f} s.", fix="Try again when nothing else runs on it."
        ) from err
    if done.returncode:
        what = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise DeviceError(f"{device} cannot be measured: {what}", fix="Run `pantheraml doctor`.")
    try:
        return MachineRates.model_validate_json(done.stdout)
    except ValidationError as err:
        raise DeviceError(
            f"{device} gave no usable rates: {done.stdout[:200]!r}.", fix="Run `pantheraml doctor`."
        ) from err
