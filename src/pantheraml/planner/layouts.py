"""In how many layouts frozen fp8 weights are kept: one, which backward passes transpose, or one for each direction.

The second is kept for MLPs alone, which have most of the weights, and costs a byte for each, up to about three quarters
of what all weights take: then the MLPs of the last layers have none. So it is for runs that are not short of memory.
Whether activations are recomputed tells that before anything is loaded; how large the weights are shows only when they
are there.
"""

from __future__ import annotations

from pantheraml.base.errors import ConfigError
from pantheraml.planner.choices import Choices
from pantheraml.specs.plan import Layouts
from pantheraml.specs.train import Checkpointing, TrainConfig

SHARE = 0.25
"""Of a device's memory, that weights in two layouts may take unless two are asked for."""


MORE = 0.75
"""Of what the weights take in one layout: about what second ones may add."""


def choose_layouts(config: TrainConfig, frozen: str | None, fused: bool, choices: Choices) -> Layouts:
    name, asked = "train.fp8_layouts", config.train.fp8_layouts
    lacking = None
    if frozen != "fp8":
        lacking = "frozen weights are not in fp8"
    elif not fused:
        lacking = "only fused layers keep a second layout"
    if asked == 2 and lacking is not None:
        raise ConfigError(f"{name}=2 is not possible: {lacking}.", todo="Leave it out.")
    if asked != "auto":
        choices.asked(name, asked)
        return asked
    if lacking is not None:
        choices.automatic(name, 1, lacking)
        return 1
    layouts, reason = layouts_for(config.train.activation_checkpointing)
    choices.automatic(name, layouts, reason)
    return layouts


def layouts_for(checkpointing: Checkpointing) -> tuple[Layouts, str]:
    """With the reason."""
    if checkpointing != "none":
        return (
            1,
            f"activation checkpointing is {checkpointing}: memory is short, and a second takes a byte a weight",
        )
    return 2, "backward passes need not transpose most of the MLPs' weights, for one more byte each"


def layers_with_two(layers: int, weight_bytes: int, mlp_bytes: int) -> int:
    """How many of a model's layers keep their MLP in two, where MLPs have `mlp_bytes` of the `weight_bytes`."""
    return layers if not mlp_bytes else min(layers, round(layers * MORE * weight_bytes / mlp_bytes))


def too_large_for_two(weight_bytes: int, device_bytes: int | None) -> str | None:
    """Why loaded weights, in one layout, are to stay in that; None: they need not, or it is not known."""
    if device_bytes is None or 2 * weight_bytes <= SHARE * device_bytes:
        return None
    twice, total = (f"{size / 2**30:.1f} GiB" for size in (2 * weight_bytes, device_bytes))
    return f"all of them twice would take {twice}, more than a quarter of the GPU's {total}"
