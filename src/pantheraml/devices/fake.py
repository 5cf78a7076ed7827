"""Clusters described by a short text instead of detected, to plan for other hardware, and for tests.

    2x8xH100-80GB nvlink, 400Gb     two nodes of eight, NVLink inside, 400 Gbit/s between them
    1xRTX4090                       one card
    8xA100-80GB pcie, 64 cores, 1TB the PCIe cards, with the host's cores and memory
    cpu 16 cores 64GB               no GPU

Figures of a GPU come from `gpu_table`. What the text does not say is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pantheraml.base.errors import ConfigError
from pantheraml.specs.gpu_table import GPUModel, by_text
from pantheraml.specs.plan import GPU, DeviceSpec

_UNITS = {"gb": 10**9, "tb": 10**12, "gib": 2**30, "tib": 2**40}
_SYNTAX = 'Write it as "2x8xH100-80GB nvlink, 400Gb", "1xRTX4090", "8xA100-80GB pcie" or "cpu 16 cores 64GB".'
_COUNTS = re.compile(r"^\s*(?:(\d+)\s*[x×*]\s*)?(\d+)\s*[x×*]\s*", re.IGNORECASE)
_CORES = re.compile(r"\b(\d+)\s*cores?\b", re.IGNORECASE)
_NETWORK = re.compile(r"\b(\d+(?:\.\d+)?)\s*(?:Gb(?:ps|it/s|/s)?)(?![A-Za-z])")
_MEMORY = re.compile(r"\b(\d+(?:\.\d+)?)\s*(GB|TB|GiB|TiB)\b")
_GPU_MEMORY = re.compile(r"[\s-](\d+)\s*GB\b", re.IGNORECASE)
MOST_PER_NODE, MOST_GPUS = 1_024, 1 << 20
"""More than anybody has; planning for a slip of the finger would take hours."""


@dataclass(frozen=True)
class Cluster:
    """Hardware of one or more equal nodes."""

    text: str
    nodes: int
    gpus_per_node: int
    model: GPUModel | None
    """None: CPU only."""
    nvlink: bool | None
    """The GPUs of a node reach each other by NVLink; None: not known, or one GPU."""
    network_gbits: float | None
    """Network of each node, in Gbit/s."""
    cpu_count: int | None
    """Of each node."""
    ram_bytes: int | None
    """Of each node."""

    def device_spec(self) -> DeviceSpec:
        """One node as the planner sees it. Cores that the text does not give count as one per GPU."""
        gpus: tuple[GPU, ...] = ()
        if self.model is not None:
            memory, capability = self.model.memory_bytes, self.model.capability
            gpus = tuple(
                GPU(
                    index=index,
                    name=self.model.name,
                    total_bytes=memory,
                    free_bytes=memory,
                    compute_capability=capability,
                )
                for index in range(self.gpus_per_node)
            )
        return DeviceSpec(
            gpus=gpus,
            cpu_count=self.cpu_count or max(1, self.gpus_per_node),
            ram_bytes=self.ram_bytes,
            driver=None,
            note=None if gpus else f"{self.text!r} has no GPU",
        )


def parse_cluster(text: str) -> Cluster:
    """Read a description of a cluster; ConfigError says how to write it, or names the nearest known GPU."""
    if re.match(r"\s*(\d+\s*x\s*)?cpu\b", text, re.IGNORECASE):
        return _cpu_cluster(text)
    if "+" in text:
        raise ConfigError(
            f"{text!r} names several kinds of GPU, and a description has one.",
            fix="Describe as many of the kind with the least memory: what fits them is what all get, and all wait for"
            " the slowest.",
        )
    counts = _COUNTS.match(text)
    rest = text[counts.end() :] if counts else text.strip()
    nodes, per_node = (int(counts[1] or 1), int(counts[2])) if counts else (1, 1)
    name_and_link, _, host = rest.partition(",")
    pcie, nvlink = (re.search(rf"\b{word}\b", name_and_link, re.IGNORECASE) is not None for word in ("pcie", "nvlink"))
    if pcie and nvlink:
        raise ConfigError(f"{text!r} says both nvlink and pcie.", fix="Keep one of them.")
    if (bits := _NETWORK.search(name_and_link)) is not None:
        raise ConfigError(
            f"{bits[0]!r} of {text!r} may be the memory of a GPU, or a network.",
            fix='Write memory in GB, and the network after a comma: "2x8xH100-80GB nvlink, 400Gb".',
        )
    name = re.sub(r"\b(pcie|nvlink)\b", " ", name_and_link, flags=re.IGNORECASE)
    memory = _GPU_MEMORY.search(name)
    bare = (name[: memory.start()] + name[memory.end() :] if memory else name).strip(" -")
    if not bare or nodes < 1 or per_node < 1:
        raise ConfigError(f"{text!r} does not describe a cluster.", fix=_SYNTAX)
    if per_node > MOST_PER_NODE or nodes * per_node > MOST_GPUS:
        raise ConfigError(
            f"{text!r} describes {per_node:,} GPUs per node on {nodes:,} node(s); at most {MOST_PER_NODE:,} per node"
            f" and {MOST_GPUS:,} in all are planned.",
            fix='Write nodes x GPUs per node: "512x8xH100" are 4,096 GPUs.',
        )
    model = by_text(bare, gigabytes=int(memory[1]) if memory else None, pcie=pcie)
    if nvlink and model.nvlink is False:
        raise ConfigError(f"{model.name} has no NVLink.", where=text, fix="Write pcie, or leave it out.")
    cores, network, ram, unknown = _host(host)
    if unknown:
        raise ConfigError(f"{unknown!r} of {text!r} is not understood.", fix=_SYNTAX)
    linked = True if nvlink else False if pcie else model.nvlink
    return Cluster(text, nodes, per_node, model, linked if per_node > 1 else None, network, cores, ram)


def _cpu_cluster(text: str) -> Cluster:
    nodes = re.match(r"\s*(?:(\d+)\s*x\s*)?cpu\b", text, re.IGNORECASE)
    assert nodes is not None
    cores, network, ram, unknown = _host(text[nodes.end() :])
    if unknown or cores is None:
        raise ConfigError(f"{text!r} does not describe a CPU host.", fix='Write it as "cpu 16 cores 64GB".')
    return Cluster(text, int(nodes[1] or 1), 0, None, None, network, cores, ram)


def _host(text: str) -> tuple[int | None, float | None, int | None, str]:
    """Cores, network, memory, and what is left over."""
    cores, network, memory = _CORES.search(text), _NETWORK.search(text), _MEMORY.search(text)
    rest = text
    for found in (cores, network, memory):
        rest = rest.replace(found[0], " ", 1) if found else rest
    ram = None if memory is None else int(float(memory[1]) * _UNITS[memory[2].lower()])
    return cores and int(cores[1]), network and float(network[1]), ram, rest.strip(" ,;")
