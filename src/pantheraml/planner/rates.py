"""Rates of a machine, from which the planner computes times. `pantheraml bench --calibrate` stores them.

A rate that was neither measured nor published is None, and so is every time that needs it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from pantheraml.base import env
from pantheraml.base.errors import ConfigError
from pantheraml.specs.frozen_model import FrozenModel

_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MachineRates(FrozenModel):
    """Achieved rates of one device, by number format."""

    device: str
    """Name of the GPU as the driver gives it, or `cpu`."""
    matmul_tflops: dict[str, _Rate] = Field(default_factory=dict)
    """bf16, fp16, fp8, fp32 -> achieved TFLOP/s of large matmuls."""
    attention_tflops: _Rate | None = None
    """Forward and backward of causal attention, counting the multiplications below the diagonal."""
    copy_gb_s: _Rate | None = None
    """Device memory, bytes read plus bytes written."""
    host_gb_s: _Rate | None = None
    """Between pinned host memory and the device, one direction."""
    launch_us: _Rate | None = None
    """Time of the host to launch one kernel."""
    link_gb_s: _Rate | None = None
    """Between the GPUs of a node, per direction and GPU."""
    watts: _Rate | None = None
    """Power of a device under load."""
    source: str
    """Origin of the figures, for display."""


def rates_file(device: str) -> Path:
    """File of the stored calibration of a device by that name."""
    name = "".join(letter if letter.isalnum() else "-" for letter in device.lower()).strip("-")
    return env.cache_root() / "rates" / f"{name}.json"


def load_rates(device: str, *, otherwise: MachineRates | None = None) -> MachineRates | None:
    """Return the stored calibration of a device by that name, else `otherwise`.

    Rates that the calibration leaves out are those of `otherwise`.
    """
    path = rates_file(device)
    try:
        text = path.read_bytes()
    except OSError:
        return otherwise
    try:
        stored = MachineRates.model_validate_json(text)
    except ValidationError as err:
        raise ConfigError(
            f"The stored rates of {device} cannot be read.",
            where=str(path),
            fix="Run `pantheraml bench --calibrate` again, or delete the file.",
        ) from err
    if otherwise is None:
        return stored
    values, borrowed = stored.model_dump(), []
    for name, value in otherwise.model_dump(exclude={"device", "source", "matmul_tflops"}).items():
        if values[name] is None and value is not None:
            values[name] = value
            borrowed.append(name)
    borrowed += sorted(f"matmul_tflops.{each}" for each in otherwise.matmul_tflops.keys() - stored.matmul_tflops.keys())
    values["matmul_tflops"] = otherwise.matmul_tflops | stored.matmul_tflops
    if borrowed:
        values["source"] = f"{stored.source}; {', '.join(borrowed)}: {otherwise.source}"
    return MachineRates.model_validate(values)


def rates_as_json(rates: MachineRates) -> str:
    """Text of the file that `load_rates` reads."""
    return json.dumps(rates.model_dump(mode="json"), indent=1) + "\n"


def slowest(machines: Sequence[MachineRates | None]) -> MachineRates | None:
    """Rates of unlike devices that wait for each other: of each kind of work the lowest, and their mean power.

    None, or no rate: that of one of them is not known.
    """
    known = [each for each in machines if each is not None]
    if len(known) < len(machines) or not known:
        return None
    if len(known) == 1:
        return known[0]

    def lowest(values: Sequence[float | None]) -> float | None:
        found = [value for value in values if value is not None]
        return min(found) if len(found) == len(values) else None

    formats = [name for name in known[0].matmul_tflops if all(name in each.matmul_tflops for each in known)]
    watts = [each.watts for each in known]
    return MachineRates(
        device=" and ".join(each.device for each in known),
        matmul_tflops={name: min(each.matmul_tflops[name] for each in known) for name in formats},
        attention_tflops=lowest([each.attention_tflops for each in known]),
        copy_gb_s=lowest([each.copy_gb_s for each in known]),
        host_gb_s=lowest([each.host_gb_s for each in known]),
        launch_us=None
        if any(each.launch_us is None for each in known)
        else max(each.launch_us or 0.0 for each in known),
        link_gb_s=lowest([each.link_gb_s for each in known]),
        watts=None if None in watts else sum(each or 0.0 for each in watts) / len(watts),
        source="the slower of " + "; ".join(each.source for each in known),
    )
