"""Inputs of predictions besides the configuration: the model's sizes, and the rates and memory of the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pantheraml.base.errors import PantheraError
from pantheraml.planner.known_models import known_config
from pantheraml.planner.known_rates import known_rates, peak_rates, rates_of
from pantheraml.planner.links import Links
from pantheraml.planner.memory.fused_layers import FUSED_FAMILIES
from pantheraml.planner.memory.predict import HOPPER
from pantheraml.planner.memory.reserved import driver_bytes
from pantheraml.planner.model_shapes import FAMILIES, ModelShapes, read_shapes, shapes_of_config
from pantheraml.planner.rates import MachineRates, slowest
from pantheraml.specs.gpu_table import GPUModel, by_driver_name
from pantheraml.specs.hf_config import read_hf_config
from pantheraml.specs.plan import GPU
from pantheraml.specs.train import ModelConfig

LIKE_ITS_MODEL = 0.05
"""Memory of a GPU may differ from its model's by this share."""

UNFUSED = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "gpt_oss"), "a mixture of experts"),
    "gemma2": "capped attention scores",
    "gpt2": "an MLP without a gate",
}
"""Families of known sizes whose layers never run fused, with what they have."""
FUSED = (*FUSED_FAMILIES, "smollm3", "ministral", "ministral3", "olmo2", "olmo3", "cwm", "exaone4")
"""Families whose layers run fused (models.fast.families); of others, nobody knows before they are loaded."""


@dataclass(frozen=True)
class ModelFacts:
    """A model as far as its sizes are known."""

    shapes: ModelShapes | None
    why_unknown: str | None = None
    heads: int | None = None
    kv_heads: int | None = None
    source: str = "its config.json"
    invalid: bool = False
    """Its config.json has sizes that no model has."""
    family: str | None = None
    hidden: int | None = None
    positions: int | None = None
    """Longest document that a run accepts; None: not known."""

    @property
    def heads_divide(self) -> int:
        """Degrees of tensor and context parallelism must divide this; 1: not known."""
        return math.gcd(self.heads or 1, self.kv_heads or self.heads or 1)

    def why_other_kernels(self, *, fused: bool) -> str | None:
        """Why layers run other kernels than those whose time is predicted; None: they run these.

        `fused`: the plan has fused layers, which a family that cannot be fused leaves as they are.
        """
        if self.family is None or self.family in FUSED or (not fused and self.family != "gemma2"):
            return None
        unfused = UNFUSED.get(self.family)
        if unfused is None:
            return f"whether layers of {self.family} run fused is not known before they are loaded"
        return f"layers of {self.family} do not run fused ({unfused})"


@dataclass(frozen=True)
class DeviceFacts:
    """Rates and memory of the devices of a run."""

    rates: MachineRates | None
    bounds: MachineRates | None
    """Peaks of the data sheet, for comparing plans where the rates are not known."""
    links: Links
    capacity_bytes: int | None
    """Memory of the device that has the least; None: not known."""
    pcie_gb_s: float | None = None
    """Of the slowest slot by the data sheet, for `bound_links`; None: not known."""

    @property
    def bound_links(self) -> Links:
        """The links, within a node at the peak of PCIe where their rate is not known: for comparing plans."""
        return self.links if self.links.link_gb_s is not None else replace(self.links, link_gb_s=self.pcie_gb_s)


def model_facts(model: ModelConfig, folder: Path | None = None) -> ModelFacts:
    """Sizes of the configured model: of `folder`, of its own folder, or of a model of that name that is known."""
    path = folder or Path(model.path).expanduser()
    values: Mapping[str, Any] | None
    if path.is_dir():
        try:
            values, shapes = read_hf_config(path), read_shapes(path)
        except PantheraError as err:
            return ModelFacts(None, err.what)
        except (ValueError, TypeError, ArithmeticError, AttributeError) as err:
            return ModelFacts(None, f"its config.json has an impossible value ({err})", invalid=True)
        if any(size < 1 for weight in shapes.weights for size in weight.shape):
            return ModelFacts(None, "its config.json has sizes of zero or less", invalid=True)
        return _facts(values, shapes, "its config.json" if values.get("model_type") in FAMILIES else "its weight files")
    values = known_config(model.path)
    if values is None:
        return ModelFacts(None, f"the sizes of {model.path} are not known here")
    return _facts(values, shapes_of_config(values), "the table of known models")


def _facts(values: Mapping[str, Any], shapes: ModelShapes, source: str) -> ModelFacts:
    text = values.get("text_config") or values
    heads = text.get("num_attention_heads", text.get("n_head"))
    hidden = text.get("hidden_size", text.get("n_embd"))
    family = text.get("model_type", values.get("model_type"))
    kv_heads = text.get("num_key_value_heads") or heads
    given = text.get("max_position_embeddings", text.get("n_positions"))
    positions = given if type(given) is int and given > 0 else None
    return ModelFacts(shapes, None, heads, kv_heads, source, family=family, hidden=hidden, positions=positions)


def device_facts(
    gpus: Sequence[GPU],
    *,
    model: GPUModel | None = None,
    links: Links | None = None,
    memory_fraction: float | None = None,
    total_memory: bool = False,
    calibrated: bool = True,
) -> DeviceFacts:
    """Facts of the GPUs of a run.

    `model`, `links`: of GPUs that are only described. `total_memory`: others will have left by then, so that not only
    the free memory counts. `calibrated`: rates measured on this machine may count; not where every node plans for
    itself, and all must come to the same result.
    """
    if not gpus:
        return DeviceFacts(None, None, Links(1, None), None)
    names = list(dict.fromkeys(gpu.name for gpu in gpus))
    models = {name: model or by_driver_name(name) for name in names}
    table = {name: None if known is None else known_rates(known) for name, known in models.items()}
    rates = slowest([rates_of(name) if model is None and calibrated else table[name] for name in names])
    if not calibrated and model is None:
        gpus = [_nominal(gpu, models[gpu.name]) for gpu in gpus]
    sizes = [_memory(gpu, memory_fraction, total_only=total_memory) for gpu in gpus]
    known_sizes = [size for size in sizes if size is not None]
    return DeviceFacts(
        rates=rates,
        bounds=slowest([None if known is None else peak_rates(known) for known in models.values()]),
        links=links or Links(len(gpus), None if rates is None else rates.link_gb_s),
        capacity_bytes=min(known_sizes) if len(known_sizes) == len(sizes) else None,
        pcie_gb_s=_slowest_slot(models.values()),
    )


def _slowest_slot(models: Iterable[GPUModel | None]) -> float | None:
    found = [None if known is None else known.pcie_gb_s for known in models]
    rates = [rate for rate in found if rate is not None]
    return min(rates) if len(rates) == len(found) else None


def _nominal(gpu: GPU, model: GPUModel | None) -> GPU:
    """The same on every node, whatever a driver keeps for itself."""
    if gpu.total_bytes is None:
        return gpu
    whole = gpu.total_bytes >> 30 << 30
    alike = model is not None and abs(model.memory_bytes - gpu.total_bytes) < LIKE_ITS_MODEL * gpu.total_bytes
    return gpu.model_copy(update={"total_bytes": model.memory_bytes if model is not None and alike else whole})


def _memory(gpu: GPU, fraction: float | None, *, total_only: bool) -> int | None:
    free = gpu.total_bytes if total_only or gpu.free_bytes is None else gpu.free_bytes
    if fraction is None or gpu.total_bytes is None or free is None:
        return free
    beside = driver_bytes(1, hopper=gpu.compute_capability is None or gpu.compute_capability >= HOPPER)
    return min(free, int(gpu.total_bytes * fraction) + beside)  # the fraction is of what torch's allocator takes
