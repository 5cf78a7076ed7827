"""Figures of GPUs by model, from data sheets and measurements. None: not known; nothing here is a guess.

Speeds are dense, without sparsity. Memory is what a process can use where that was measured, else the nominal size,
which is less. Prices are those of the cheapest offers seen in August 2026, per GPU and hour.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pantheraml.base.errors import ConfigError

GIB = 2**30
GB = 10**9


@dataclass(frozen=True, kw_only=True)
class GPUModel:
    """One model in one memory size and form."""

    name: str
    """Short name without the memory size."""
    pattern: str
    """Regular expression of the driver's name for it."""
    capability: tuple[int, int] | None
    nominal_gb: int
    usable_bytes: int | None = None
    """Measured; None: not measured."""
    bf16_tflops: float | None = None
    """Peak of bf16 matmuls; of fp16 where `bf16` is false."""
    bf16: bool = True
    fp8_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    nvlink: bool | None = None
    """None: not known."""
    nvlink_gb_s: float | None = None
    """Per direction, over all links."""
    pcie_gb_s: float | None = None
    """Of its slot with 16 lanes, per direction, by the generation that the data sheet names."""
    watts: int | None = None
    dollars_per_hour: float | None = None

    @property
    def memory_bytes(self) -> int:
        return self.usable_bytes or self.nominal_gb * GB

    @property
    def text(self) -> str:
        """Name with memory size, as cluster texts spell it."""
        return f"{self.name}-{self.nominal_gb}GB"


def _gib(value: float) -> int:
    return int(value * GIB)


# fmt: off
TABLE: tuple[GPUModel, ...] = (
    GPUModel(name="T4", pattern=r"T4", capability=(7, 5), nominal_gb=16, bf16_tflops=65, bf16=False,
             bandwidth_gb_s=320, nvlink=False, pcie_gb_s=16, watts=70, dollars_per_hour=0.35),
    GPUModel(name="V100", pattern=r"V100-SXM\w+-16GB", capability=(7, 0), nominal_gb=16, bf16_tflops=125, bf16=False,
             bandwidth_gb_s=900, nvlink=True, nvlink_gb_s=150, pcie_gb_s=16, watts=300, dollars_per_hour=0.79),
    GPUModel(name="V100", pattern=r"V100-SXM\w+-32GB", capability=(7, 0), nominal_gb=32, bf16_tflops=125, bf16=False,
             bandwidth_gb_s=900, nvlink=True, nvlink_gb_s=150, pcie_gb_s=16, watts=300, dollars_per_hour=0.79),
    GPUModel(name="A10", pattern=r"A10", capability=(8, 6), nominal_gb=24, bf16_tflops=125,
             bandwidth_gb_s=600, nvlink=False, pcie_gb_s=32, watts=150, dollars_per_hour=1.29),
    GPUModel(name="L4", pattern=r"L4", capability=(8, 9), nominal_gb=24, bf16_tflops=121, fp8_tflops=242,
             bandwidth_gb_s=300, nvlink=False, pcie_gb_s=32, watts=72, dollars_per_hour=0.49),
    GPUModel(name="L40S", pattern=r"L40S", capability=(8, 9), nominal_gb=48, usable_bytes=_gib(44.39), bf16_tflops=362,
             fp8_tflops=733, bandwidth_gb_s=864, nvlink=False, pcie_gb_s=32, watts=350, dollars_per_hour=0.99),
    GPUModel(name="A100", pattern=r"A100-SXM4-40GB", capability=(8, 0), nominal_gb=40, bf16_tflops=312,
             bandwidth_gb_s=1_555, nvlink=True, nvlink_gb_s=300, pcie_gb_s=32, watts=400, dollars_per_hour=1.99),
    GPUModel(name="A100", pattern=r"A100-SXM4-80GB", capability=(8, 0), nominal_gb=80, usable_bytes=_gib(79.25),
             bf16_tflops=312, bandwidth_gb_s=2_039, nvlink=True, nvlink_gb_s=300, pcie_gb_s=32, watts=400,
             dollars_per_hour=1.59),
    GPUModel(name="A100-PCIe", pattern=r"A100-PCIE-40GB", capability=(8, 0), nominal_gb=40, bf16_tflops=312,
             bandwidth_gb_s=1_555, pcie_gb_s=32, watts=250),
    GPUModel(name="A100-PCIe", pattern=r"A100 80GB PCIe", capability=(8, 0), nominal_gb=80, bf16_tflops=312,
             bandwidth_gb_s=1_935, pcie_gb_s=32, watts=300),
    GPUModel(name="H100-PCIe", pattern=r"H100 PCIe", capability=(9, 0), nominal_gb=80, bf16_tflops=756,
             fp8_tflops=1_513, bandwidth_gb_s=2_000, pcie_gb_s=64, watts=350, dollars_per_hour=2.89),
    GPUModel(name="H100", pattern=r"H100 80GB HBM3", capability=(9, 0), nominal_gb=80, usable_bytes=_gib(79.18),
             bf16_tflops=989, fp8_tflops=1_979, bandwidth_gb_s=3_350, nvlink=True, nvlink_gb_s=450,
             pcie_gb_s=64, watts=700,
             dollars_per_hour=3.29),
    GPUModel(name="H200", pattern=r"H200", capability=(9, 0), nominal_gb=141, usable_bytes=_gib(139), bf16_tflops=989,
             fp8_tflops=1_979, bandwidth_gb_s=4_800, nvlink=True, nvlink_gb_s=450, pcie_gb_s=64, watts=700,
             dollars_per_hour=4.50),
    GPUModel(name="B200", pattern=r"B200", capability=(10, 0), nominal_gb=180, bf16_tflops=2_250, fp8_tflops=4_500,
             bandwidth_gb_s=8_000, nvlink=True, nvlink_gb_s=900, watts=1_000, dollars_per_hour=6.69),
    GPUModel(name="RTX3090", pattern=r"GeForce RTX 3090", capability=(8, 6), nominal_gb=24, bf16_tflops=71,
             bandwidth_gb_s=936, pcie_gb_s=32, watts=350, dollars_per_hour=0.50),
    GPUModel(name="RTX4090", pattern=r"GeForce RTX 4090", capability=(8, 9), nominal_gb=24, usable_bytes=_gib(23.52),
             bf16_tflops=165, fp8_tflops=330, bandwidth_gb_s=1_008, nvlink=False, pcie_gb_s=32, watts=450,
             dollars_per_hour=0.74),
    GPUModel(name="RTX5090", pattern=r"GeForce RTX 5090", capability=(12, 0), nominal_gb=32, usable_bytes=_gib(31.36),
             bf16_tflops=209.5, bandwidth_gb_s=1_792, nvlink=False, pcie_gb_s=64, watts=575, dollars_per_hour=0.99),
    GPUModel(name="MI300X", pattern=r"(AMD )?Instinct MI300X.*", capability=None, nominal_gb=192, bf16_tflops=1_307,
             fp8_tflops=2_615, bandwidth_gb_s=5_300, watts=750, dollars_per_hour=2.39),
)
# fmt: on

LIKE = 0.4
"""How alike an unknown name must be to a known one that is suggested."""
_VENDORS = re.compile(r"^(NVIDIA|Tesla|Quadro) +", re.IGNORECASE)


def by_driver_name(name: str) -> GPUModel | None:
    """Return the model that a driver calls `name`; None: it is not in the table."""
    bare = name
    while (shorter := _VENDORS.sub("", bare)) != bare:
        bare = shorter
    return next((model for model in TABLE if re.fullmatch(model.pattern, bare, re.IGNORECASE)), None)


def by_text(name: str, *, gigabytes: int | None = None, pcie: bool = False) -> GPUModel:
    """Return the model that people call `name`, such as H100 or "RTX 4090"; the largest one if `gigabytes` is None.

    `pcie`: the PCIe card where the table has one. ConfigError names the nearest known model.
    """
    wanted = _key(name)
    for key in (wanted + "pcie", wanted) if pcie else (wanted,):
        found = [model for model in TABLE if key in _keys(model)]
        if not found:
            continue
        sized = [model for model in found if gigabytes in (None, model.nominal_gb)]
        if not sized:
            sizes = " or ".join(f"{model.nominal_gb} GB" for model in found)
            raise ConfigError(
                f"{found[0].name} exists with {sizes}, not with {gigabytes} GB.",
                where=name,
                fix=f"Write {sizes}, or leave the memory out.",
            )
        return max(sized, key=lambda model: model.nominal_gb)
    names = {key: model.text for model in TABLE for key in _keys(model)}
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=LIKE)
    meant = f"Did you mean {names[near[0]]}? " if near else ""
    raise ConfigError(
        f"{name!r} is not a GPU whose figures are known.",
        fix=f"{meant}Known: {', '.join(dict.fromkeys(model.name for model in TABLE))}.",
    )


def _key(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|amd|tesla|instinct|geforce)+", "", bare)


def _keys(model: GPUModel) -> set[str]:
    """Spellings of a model: RTX4090 and 4090, H100 and H100 SXM."""
    key = _key(model.name)
    forms = {key, f"{key}sxm"} if model.nvlink else {key}
    return forms | {key.removeprefix("rtx")}
