"""NVML answers, refusals and old drivers: every value is right or None."""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pynvml
import pytest

from pantheraml.devices.fake_nvml import FakeNvml
from pantheraml.devices.inventory import take_inventory
from pantheraml.devices.nvml import NoDriverError, Nvml
from pantheraml.devices.probe import probe
from pantheraml.devices.sampler import GPUSampler

Host = Callable[..., FakeNvml]

REMOVED_IN_CUDA_14 = {
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetViolationStatus",
    "nvmlDeviceGetNvLinkUtilizationCounter",
    "nvmlDeviceGetPowerState",
    "nvmlDeviceGetPowerManagementMode",
    "nvmlDeviceGetDetailedEccErrors",
}


def test_an_h200_host(host: Host) -> None:
    fake = host("8xH200")
    fake.gpus[1].processes = [(os.getpid(), 5 << 30), (2**22 - 3, 1 << 30)]
    found = take_inventory()
    assert (found.driver, found.cuda, found.note) == ("580.95.05", "13.0", None)
    gpu = found.gpus[5]
    assert (gpu.index, gpu.name, gpu.compute_capability) == (5, "NVIDIA H200", (9, 0))
    assert (gpu.pcie, gpu.numa_node, gpu.ecc, gpu.mig, gpu.nvlinks) == ((5, 16), 1, True, False, (18, 18))
    assert gpu.pci_bus_id == "00000000:15:00.0"
    assert gpu.power_limit_watts == 700
    assert gpu.total_bytes is not None
    assert gpu.free_bytes == gpu.total_bytes - (600 << 20)
    assert (gpu.health.status, gpu.health.reasons) == ("ok", ())
    assert {way for row in found.connections for way in row} == {None, "NVLink"}
    mine, foreign = found.gpus[1].processes or ()
    assert mine.user == psutil.Process().username()
    assert mine.command
    assert (foreign.memory_bytes, foreign.user, foreign.command) == (1 << 30, None, None)
    assert fake.open_sessions == 0
    assert not REMOVED_IN_CUDA_14 & fake.calls.keys()


def test_a_geforce_card_tells_less(host: Host) -> None:
    host("1xRTX4090")
    (gpu,) = take_inventory().gpus
    assert (gpu.ecc, gpu.mig, gpu.nvlinks) == (None, None, None)
    assert gpu.health.status == "ok"
    assert gpu.thermal_margin == 87 - 34  # from its slowdown temperature
    sampler = GPUSampler()
    (snapshot,) = sampler.take(everything=True)
    sampler.close()
    assert (snapshot.memory_temperature_celsius, snapshot.nvlink_tx_bytes) == (None, None)
    assert (snapshot.temperature_celsius, snapshot.power_watts, snapshot.energy_joules) == (34, 76.0, 1000.0)


def test_pcie_topology(host: Host) -> None:
    host("8xA100-80GB pcie")
    first = take_inventory().connections[0]
    assert first == (None, "PCIe switch", "NUMA node", "NUMA node", *["CPU interconnect"] * 4)


def test_an_old_driver_is_asked_in_the_old_way(host: Host) -> None:
    fake = host("2xA100-80GB", old=True)
    sampler = GPUSampler()
    snapshot = sampler.take(everything=True)[0]
    sampler.close()
    assert (snapshot.temperature_celsius, snapshot.event_reasons) == (34, ("idle",))
    assert fake.calls["nvmlDeviceGetTemperature"] == fake.calls["nvmlDeviceGetTemperatureV"] == 2


def test_a_binding_without_new_functions(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("1xH200")
    monkeypatch.setattr("pantheraml.devices.nvml.binding", Older())
    sampler = GPUSampler()
    (snapshot,) = sampler.take(everything=True)
    sampler.close()
    assert snapshot.temperature_celsius == 34


class Older:
    """A binding of the time before nvmlDeviceGetTemperatureV."""

    def __init__(self) -> None:
        self._fake = FakeNvml("1xH200")

    def __getattr__(self, name: str) -> object:
        if name == "nvmlDeviceGetTemperatureV":
            raise AttributeError(name)
        return getattr(self._fake, name)


def test_snapshots_have_the_units_of_their_names(host: Host) -> None:
    gpu = host("2xH200").gpus[1]
    gpu.nvlink_kib, gpu.pcie_bytes, gpu.energy_mj = (36, 18), (7 << 33, 5), 2_500
    gpu.power_watts, gpu.utilization, gpu.reasons = 612.5, 93, 0x44
    sampler = GPUSampler([1])
    (snapshot,) = sampler.take(everything=True)
    (quick,) = sampler.take()
    sampler.close()
    assert snapshot.index == quick.index == 1
    assert (snapshot.nvlink_tx_bytes, snapshot.nvlink_rx_bytes) == (36 * 1024, 18 * 1024)  # of all links, not of link 0
    assert (snapshot.pcie_tx_bytes, snapshot.pcie_rx_bytes) == (7 << 33, 5)
    assert (snapshot.energy_joules, snapshot.power_watts, snapshot.utilization_percent) == (2.5, 612.5, 93)
    assert snapshot.event_reasons == ("software power cap", "hardware thermal slowdown")
    assert snapshot.memory_percent == pytest.approx(100 * (600 << 20) / gpu.total_bytes)
    assert (quick.utilization_percent, quick.power_watts, quick.event_reasons) == (93, None, None)


def test_a_counter_of_32_bits_is_not_used(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = host("1xH200")
    narrow = fake.__getattr__

    def fields(gpu: object, wanted: object) -> object:
        values = narrow("nvmlDeviceGetFieldValues")(gpu, wanted)
        for value in values:
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
        return values

    monkeypatch.setattr(fake, "nvmlDeviceGetFieldValues", fields, raising=False)
    sampler = GPUSampler()
    (snapshot,) = sampler.take(everything=True)
    sampler.close()
    assert snapshot.pcie_tx_bytes is None
    assert snapshot.energy_joules == 1000.0


def test_what_is_not_supported_is_asked_once(host: Host) -> None:
    fake = host("1xRTX4090")
    asked: list[int] = []
    original = fake.__getattr__("nvmlDeviceGetFieldValues")
    fake.nvmlDeviceGetFieldValues = lambda gpu, wanted: (asked.append(len(wanted)), original(gpu, wanted))[1]
    sampler = GPUSampler()
    sampler.take(everything=True)
    fake.gpus[0].lost = pynvml.NVML_ERROR_GPU_IS_LOST  # says nothing of what is supported
    assert sampler.take(everything=True)[0].power_watts is None
    fake.gpus[0].lost = 0
    assert sampler.take(everything=True)[0].power_watts == 76.0
    sampler.close()
    assert asked == [7, 4, 4]


def test_a_lost_gpu_is_shown_as_such(host: Host) -> None:
    fake = host("2xH200")
    fake.gpus[0].lost = pynvml.NVML_ERROR_GPU_IS_LOST
    lost, well = take_inventory().gpus
    assert (lost.name, lost.total_bytes, lost.health.status) == ("unknown", None, "fail")
    assert lost.health.reasons == ("the driver has lost the GPU",)
    assert well.health.status == "ok"
    assert probe().gpus[0].total_bytes is None


def test_no_driver(host: Host) -> None:
    host("cpu 8 cores")
    with pytest.raises(NoDriverError, match="no NVIDIA driver"):
        Nvml()
    found = take_inventory()
    assert found.gpus == ()
    assert found.note is not None
    assert found.ram_bytes == psutil.virtual_memory().total
    sampler = GPUSampler()
    assert sampler.take(everything=True) == []
    assert sampler.note == found.note


def test_hidden_gpus(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host("4xH200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert [gpu.index for gpu in take_inventory().gpus] == [2, 0]
    assert [gpu.index for gpu in probe().gpus] == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert take_inventory().note == probe().note == "CUDA_VISIBLE_DEVICES hides every GPU"


INSTANCES = (("MIG-aaaa-1", 70 << 30), ("MIG-aaaa-2", 35 << 30))


class TestMIG:
    def test_cuda_shows_whole_gpus_rather_than_instances(self, host: Host) -> None:
        host("2xH200").gpus[0].mig = list(INSTANCES)
        (gpu,) = probe().gpus
        assert (gpu.index, gpu.mig_uuid) == (1, None)

    def test_the_first_instance_of_divided_gpus(self, host: Host) -> None:
        for gpu in host("2xH200").gpus:
            gpu.mig = [(f"MIG-{gpu.index}-1", 70 << 30)]
        (found,) = probe().gpus
        assert (found.index, found.mig_uuid, found.total_bytes) == (0, "MIG-0-1", 70 << 30)
        (shown,) = take_inventory().gpus
        assert (shown.uuid, shown.mig) == ("MIG-0-1", True)

    def test_an_instance_by_name(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        host("2xH200").gpus[1].mig = list(INSTANCES)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa-2,MIG-aaaa-1")
        (gpu,) = probe().gpus
        assert (gpu.index, gpu.mig_uuid, gpu.total_bytes, gpu.name) == (1, "MIG-aaaa-2", 35 << 30, "NVIDIA H200 MIG")
        sampler = GPUSampler()
        (snapshot,) = sampler.take(everything=True)
        sampler.close()
        assert snapshot.utilization_percent is None  # NVML has none for instances
        assert snapshot.power_watts == 76.0
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa")
        assert probe().gpus == (), "ambiguous"
