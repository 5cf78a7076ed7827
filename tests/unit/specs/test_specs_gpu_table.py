"""The GPU table and clusters described by a text."""

from __future__ import annotations

import pytest

from pantheraml.base.errors import ConfigError
from pantheraml.devices.fake import Cluster, parse_cluster
from pantheraml.specs.gpu_table import GIB, TABLE, by_driver_name, by_text


@pytest.mark.parametrize(
    ("driver_name", "text"),
    [
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA L4", "L4-24GB"),
    ],
)
def test_names_that_drivers_give(driver_name: str, text: str) -> None:
    model = by_driver_name(driver_name)
    assert model is not None
    assert model.text == text


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 NVL", "unknown"])
def test_similar_names_are_not_the_same_gpu(name: str) -> None:
    assert by_driver_name(name) is None


def test_every_row_is_found_by_its_own_text() -> None:
    assert len({model.text for model in TABLE}) == len(TABLE)
    for model in TABLE:
        assert by_text(model.name, gigabytes=model.nominal_gb) is model
        # a card of 141 GB has 131 GiB or a little more
        assert 0.9 * model.nominal_gb * 1e9 < model.memory_bytes <= 1.07 * model.nominal_gb * 2**30


def test_unknown_figures_stay_unknown() -> None:
    assert by_text("RTX5090").fp8_tflops is None
    assert by_text("MI300X").nvlink_gb_s is None
    assert by_text("T4").fp8_tflops is None
    assert not by_text("T4").bf16


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "model", "nvlink", "network"),
    [
        ("2x8xH100-80GB nvlink, 400Gb", 2, 8, "H100-80GB", True, 400.0),
        ("1xRTX4090", 1, 1, "RTX4090-24GB", None, None),
        ("8xA100-80GB pcie", 1, 8, "A100-PCIe-80GB", False, None),
        ("2 * 8×H100", 2, 8, "H100-80GB", True, None),
        ("4 x NVIDIA RTX 5090", 1, 4, "RTX5090-32GB", False, None),
        ("8x H100 SXM", 1, 8, "H100-80GB", True, None),
        ("2x4090", 1, 2, "RTX4090-24GB", False, None),
        ("A100-40GB", 1, 1, "A100-40GB", None, None),
        ("2x3090", 1, 2, "RTX3090-24GB", None, None),
    ],
)
def test_clusters(text: str, nodes: int, per_node: int, model: str, nvlink: bool | None, network: float | None) -> None:
    found = parse_cluster(text)
    assert (found.nodes, found.gpus_per_node, found.nvlink, found.network_gbits) == (nodes, per_node, nvlink, network)
    assert found.model is not None
    assert found.model.text == model
    assert found.cpu_count is None
    assert found.ram_bytes is None


def test_hosts() -> None:
    cpu = parse_cluster("cpu 16 cores 64GB")
    assert cpu == Cluster("cpu 16 cores 64GB", 1, 0, None, None, None, 16, 64 * 10**9)
    spec = cpu.device_spec()
    assert (spec.gpus, spec.cpu_count, spec.ram_bytes) == ((), 16, 64 * 10**9)
    assert spec.note is not None
    full = parse_cluster("8xH200, 192 cores, 2TiB, 3.2Gb")
    assert (full.cpu_count, full.ram_bytes, full.network_gbits) == (192, 2**41, 3.2)


def test_a_cluster_is_a_plannable_node() -> None:
    spec = parse_cluster("2x8xH100").device_spec()
    assert [gpu.index for gpu in spec.gpus] == list(range(8))
    assert {(gpu.total_bytes, gpu.compute_capability) for gpu in spec.gpus} == {(int(79.18 * GIB), (9, 0))}
    assert spec.cpu_count == 8
    assert spec.ram_bytes is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH1000", "Did you mean H100-80GB?"),
        ("8xRTX 4900", "Did you mean RTX4090-24GB?"),
        ("none", "known.\n  fix: Known: T4"),
        ("2xA100-40GB+1xH100-80GB", "several kinds of GPU"),
        ("8xH100-90GB", "with 80 GB, not with 90 GB"),
        ("2x8xA100 40Gb", "'40Gb' of '2x8xA100 40Gb' may be the memory of a GPU, or a network"),
        ("2x8xH100-80GB nvlink 400Gbps", "the network after a comma"),
        ("4xL4 nvlink", "has no NVLink"),
        ("4xA100 nvlink pcie", "both nvlink and pcie"),
        ("8xH100, soon", "'soon'"),
        ("0xH100", "does not describe a cluster"),
        ("", "does not describe a cluster"),
        ("4096xH100", "at most 1,024 per node"),
        ("1000000x8xH100", "8 GPUs per node on 1,000,000 node(s)"),
        ("cpu", "cpu 16 cores 64GB"),
    ],
)
def test_what_is_not_understood(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    assert says in str(caught.value)
