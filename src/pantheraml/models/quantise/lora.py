"""What PEFT's LoRA layer is over a packed weight, whatever it is packed in."""

from __future__ import annotations

from typing import cast

from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from pantheraml.base.errors import UnsupportedModelError


class PackedLoraLinear(LoraLinear):
    """PEFT's LoRA layer over a frozen, packed layer. A merge would have to round again, so it is refused."""

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT warns about layer types it does not know
        return cast(int, module.in_features), cast(int, module.out_features)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        raise UnsupportedModelError(
            "An adapter cannot be merged into packed (fp8, int8 or nf4) weights without loss.",
            todo="Use `pantheraml export --merge`, which merges into plain weights.",
        )

    def unmerge(self) -> None:
        raise UnsupportedModelError("An adapter over packed weights is never merged, so there is nothing to unmerge.")
