"""Cost of sampling GPUs and host beside a run: CPU time per sample, and share of a core at one sample a second.

A fake driver answers first, which measures our own code. With a GPU, its driver is measured too, call by call
(`calls`), and the sampler for some seconds as a run uses it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from table import Column, Table

LIMIT_PERCENT = 0.1
"""Of a core."""


def run(samples: int = 300, rounds: int = 5, seconds: float = 20.0) -> dict[str, Any]:
    """Measure `samples` samples, median over `rounds`; with a GPU, also the background sampler for `seconds`."""
    from pantheraml.devices import nvml
    from pantheraml.devices.fake_nvml import FakeNvml
    from pantheraml.devices.probe import probe

    found: list[dict[str, Any]] = []
    real = nvml.binding
    for cluster in ("cpu 8 cores", "1xH200", "8xH200"):
        nvml.binding = FakeNvml(cluster)
        found.append({"driver": f"fake, {cluster}", **_cost(samples, rounds)})
    nvml.binding = real
    gpus = probe().gpus
    if gpus:
        found.append({"driver": f"{len(gpus)} x {gpus[0].name}", **_cost(samples, rounds), **_background(seconds)})
        found[-1]["calls"] = _calls()
    return {"parameters": {"samples": samples, "rounds": rounds, "seconds": seconds}, "results": found}


def _cost(samples: int, rounds: int) -> dict[str, Any]:
    """CPU and wall time of a sample in microseconds, without and with health."""
    from pantheraml.devices.background import HEALTH_SECONDS, _Readings

    results: dict[str, Any] = {}
    for name, period in (("sample", 1e9), ("with_health", 0.0)):
        with _Readings(None, period) as readings:
            readings.take()
            cpu, wall = _measure(readings.take, samples if period else max(1, samples // 10), rounds)
        results |= {f"{name}_us": round(cpu, 1), f"{name}_wall_us": round(wall, 1)}
    health = max(0.0, results["with_health_us"] - results["sample_us"])
    results["core_percent"] = round((results["sample_us"] + health / HEALTH_SECONDS) / 1e6 * 100, 4)
    return results


def _measure(call: Callable[[], object], times: int, rounds: int) -> tuple[float, float]:
    cpus, walls = [], []
    for _ in range(rounds):
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(times):
            call()
        cpus.append((time.thread_time() - cpu) / times * 1e6)
        walls.append((time.perf_counter() - wall) / times * 1e6)
    return statistics.median(cpus), statistics.median(walls)


def _background(seconds: float) -> dict[str, Any]:
    from pantheraml.devices.background import BackgroundSampler

    began = time.monotonic()
    with BackgroundSampler() as sampler:
        time.sleep(seconds)
    elapsed = time.monotonic() - began
    share = round(100 * sampler.cpu_seconds / elapsed, 4)
    return {"background_samples": sampler.taken, "background_core_percent": share}


def _calls() -> dict[str, Any]:
    """Microseconds of CPU and wall time of each NVML call of a sample, and the answer, for the first GPU."""
    import pynvml

    from pantheraml.devices.nvml import Nvml
    from pantheraml.devices.sampler import _FIELDS

    with Nvml() as session:
        gpu = session.devices()[0]
        calls: dict[str, Callable[[], Any]] = {
            "memory": gpu.memory,
            "utilization": gpu.utilization,
            "temperature": gpu.temperature,
            "clock": lambda: gpu.clock_mhz(pynvml.NVML_CLOCK_SM),
            "event_reasons": gpu.event_reasons,
            "fields, all": lambda: gpu.fields(tuple(_FIELDS.values())),
            **{f"field {name}": lambda field=field: gpu.fields((field,)) for name, field in _FIELDS.items()},
            "thermal_margin": gpu.thermal_margin,
            "nvlinks": gpu.nvlinks,
            "processes": gpu.processes,
        }
        found = {}
        for name, call in calls.items():
            answer = call()
            cpu, wall = _measure(call, 50, 3)
            found[name] = {"cpu_us": round(cpu, 1), "wall_us": round(wall, 1), "answer": str(answer)}
        raw = pynvml.nvmlDeviceGetFieldValues(gpu.handle, [_FIELDS["pcie_tx"], _FIELDS["energy_mj"]])
        found["value types of pcie_tx, energy_mj"] = [(value.nvmlReturn, value.valueType) for value in raw]
    return found


TABLE = Table(
    title="Sampling GPUs",
    how="CPU time of a sample of all GPUs and the host, as a run takes one a second, and of one with health, as every"
    f" half minute; limit {LIMIT_PERCENT:g} % of a core. Rows of a fake driver are our own code without the driver's.",
    columns=(
        Column("driver", "driver"),
        Column("us per sample", "sample_us"),
        Column("with health", "with_health_us"),
        Column("share of a core, %", "core_percent"),
    ),
)
