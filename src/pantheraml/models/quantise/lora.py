"""What PEFT's LoRA layer is over a packed weight, whatever it is packed in."""

from __future__ import annotations

from typing import Any, cast

from peft.tuners.lora import Linear as LoraLinear
from torch import nn


class PackedLoraLinear(LoraLinear):
    """PEFT's LoRA layer over a frozen, packed layer."""

    _packed: tuple[nn.Module, ...] = ()

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT warns about layer types it does not know
        return cast(int, module.in_features), cast(int, module.out_features)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Into a plain layer, which takes the place of the packed one until it is unmerged. The adapter has learnt to
        correct the weights as packing left them, so those are what it is merged into."""
        packed: Any = self.get_base_layer()
        if hasattr(packed, "to_linear"):
            self.base_layer = packed.to_linear(packed.dense_dtype).requires_grad_(False)
            self.fan_in_fan_out = getattr(packed, "from_conv1d", False)
            self._packed = (packed,)  # not a child of this module any more
        try:
            super().merge(safe_merge, adapter_names)
        finally:
            if not self.merged:  # nothing was asked for, or it could not be done
                self._put_back()

    def unmerge(self) -> None:
        if not self.merged:
            super().unmerge()  # which says so
            return
        self._put_back()
        self.merged_adapters.clear()

    def _put_back(self) -> None:
        """The packed layer."""
        self.base_layer = self._packed[0].to(self.get_base_layer().weight.device)
        self.fan_in_fan_out, self._packed = False, ()
