"""Number of layouts of frozen fp8 weights: one that every backward transposes, or a second, transposed copy.

The second layout is kept only for MLPs, which have most of the weights. It costs one byte per weight, up to about three
quarters of the memory of all weights; beyond that the MLPs of the last layers have none. So it is for runs with memory
to spare: activation checkpointing tells that before anything is loaded, the size of the weights only after loading.
"""

from __future__ import annotations

from pantheraml.base.errors import ConfigError
from pantheraml.planner.choices import Choices
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import Checkpointing, TrainConfig

MAX_MEMORY_SHARE = 0.25
"""Share of a device's memory that two layouts of all weights may take with fp8_layouts=auto."""

SECOND_LAYOUT_SHARE = 0.75
"""Limit on the memory of second layouts, as a share of the weights in one layout."""


def choose_layouts(config: TrainConfig, frozen: str | None, fused: bool, choices: Choices) -> Layouts:
    name, requested = "train.fp8_layouts", config.train.fp8_layouts
    unsupported = None
    if frozen != "fp8":
        unsupported = "frozen weights are not in fp8"
    elif not fused:
        unsupported = "only fused layers use a second layout"
    if requested == 2 and unsupported is not None:
        raise ConfigError(f"{name}=2 is not possible: {unsupported}.", fix=f"Remove {name}.")
    if requested != "auto":
        choices.configured(name, requested)
        return requested
    if unsupported is not None:
        choices.automatic(name, 1, unsupported)
        return 1
    layouts, reason = layouts_for(config.train.activation_checkpointing)
    choices.automatic(name, layouts, reason)
    return layouts


def layouts_for(checkpointing: Checkpointing) -> tuple[Layouts, str]:
    """Return the number of layouts for fp8_layouts=auto, and the reason."""
    if checkpointing != "none":
        return (
            1,
            f"activation_checkpointing={checkpointing} saves memory, and a second layout takes one byte per weight",
        )
    return 2, "the backward need not transpose most MLP weights, for one more byte per weight"


def layers_with_second_layout(layers: int, weight_bytes: int, mlp_bytes: int) -> int:
    """Number of layers whose MLP gets a second layout; MLPs have `mlp_bytes` of all `weight_bytes`."""
    return layers if not mlp_bytes else min(layers, round(layers * SECOND_LAYOUT_SHARE * weight_bytes / mlp_bytes))


def why_single_layout(weight_bytes: int, device_bytes: int | None) -> str | None:
    """Why the loaded weights should keep one layout; None: two are fine, or the device's memory is unknown."""
    if device_bytes is None or 2 * weight_bytes <= MAX_MEMORY_SHARE * device_bytes:
        return None
    twice, total = (f"{size / 2**30:.1f} GiB" for size in (2 * weight_bytes, device_bytes))
    return f"two layouts of all weights would take {twice}, more than a quarter of the GPU's {total}"
