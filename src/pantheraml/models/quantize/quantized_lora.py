"""PEFT's LoRA layer over a quantized linear layer of any format."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import nn


class QuantizedLoraLinear(LoraLinear):
    """PEFT's LoRA layer over a frozen, quantized layer."""

    _quantized: tuple[nn.Module, ...] = ()

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        # PEFT warns about layer types it does not know
        return cast(int, module.in_features), cast(int, module.out_features)

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device | None, torch.dtype | None]:
        # no dtype: PEFT would cast the adapter to that of the quantized weight, and initial values in e4m3 lose digits
        return super()._get_base_layer_device_and_dtype(base_layer)[0], None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge into a dequantized layer, which replaces the quantized one until `unmerge`.

        The adapter was trained against the quantized weights, so the dequantized weights are the correct merge target.
        """
        quantized: Any = self.get_base_layer()
        if hasattr(quantized, "to_linear"):
            self.base_layer = quantized.to_linear(quantized.dense_dtype).requires_grad_(False)
            self.fan_in_fan_out = getattr(quantized, "from_conv1d", False)
            self._quantized = (quantized,)  # in a tuple, so that it is not a submodule
        try:
            super().merge(safe_merge, adapter_names)
        finally:
            if not self.merged:  # no adapter to merge, or the merge failed
                self._restore_quantized()

    def unmerge(self) -> None:
        if not self.merged:
            super().unmerge()  # warns
            return
        self._restore_quantized()
        self.merged_adapters.clear()

    def _restore_quantized(self) -> None:
        if not self._quantized:  # the layer over plain weights that a merged save stands in
            return
        self.base_layer = self._quantized[0].to(self.get_base_layer().weight.device)
        self.fan_in_fan_out, self._quantized = False, ()
