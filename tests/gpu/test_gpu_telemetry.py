"""The real driver: its readings agree with torch, load is seen, and `memory_fraction` is enforced."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import torch

from pantheraml.devices.background import BackgroundSampler
from pantheraml.devices.inventory import take_inventory
from pantheraml.devices.select import select_here
from pantheraml.specs.gpu_table import by_driver_name

LIMITED = """
import torch
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.train import DataConfig, ModelConfig, TrainConfig
from tests.harness import make_plan
config = TrainConfig(model=ModelConfig(path="m"), data=DataConfig(path="d"))
plan = make_plan(config, micro=1, device="cuda").model_copy(update={"memory_fraction": 0.1})
total = torch.cuda.get_device_properties(0).total_memory
with open_world(plan, timeout_seconds=5):
    small = torch.empty(int(total * 0.05), dtype=torch.uint8, device="cuda")
    try:
        torch.empty(int(total * 0.08), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        print("limited")
"""


def test_the_inventory_agrees_with_torch() -> None:
    gpu = take_inventory().gpus[0]
    properties = torch.cuda.get_device_properties(0)
    assert gpu.name == properties.name
    assert gpu.compute_capability == (properties.major, properties.minor)
    assert gpu.total_bytes is not None
    assert abs(gpu.total_bytes - properties.total_memory) < 0.02 * gpu.total_bytes
    assert gpu.uuid == f"GPU-{properties.uuid}"
    assert gpu.health.status in ("ok", "warn"), gpu.health.reasons
    assert gpu.pcie is not None
    model = by_driver_name(gpu.name)
    if model is not None:
        assert model.capability == gpu.compute_capability
        assert 0.97 * gpu.total_bytes < model.memory_bytes <= gpu.total_bytes


def test_load_is_seen() -> None:
    stop = threading.Event()

    def load() -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        while not stop.is_set():
            for _ in range(50):
                a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        with BackgroundSampler() as sampler:
            time.sleep(6)
    finally:
        stop.set()
        thread.join()
    first, last = sampler.samples()[1].gpus[0], sampler.samples()[-1].gpus[0]
    assert last.utilization_percent is not None
    assert last.utilization_percent > 80
    assert last.energy_joules is not None
    assert first.energy_joules is not None
    assert last.energy_joules - first.energy_joules > 100
    assert last.used_bytes is not None
    assert last.used_bytes > 3 * 8192 * 8192
    assert sampler.cpu_seconds < 0.1


def test_memory_fraction_is_enforced() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.stdout == "limited\n", done.stderr


def test_the_gpu_is_selected_with_a_reason() -> None:
    found = select_here()
    assert found.indices
    assert found.reason
