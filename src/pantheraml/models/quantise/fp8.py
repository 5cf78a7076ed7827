"""FP8: frozen linear layers in e4m3 with row-wise scales, and the LoRA layer that is one product with them.

Two layouts of each weight are kept, one for the forward and one for the backward product: tensor cores want either side
of an fp8 product laid out along the inner dimension. Together they take what bf16 takes. The adapter stays PEFT's own
(`lora_A`, `lora_B`, saved, loaded and switched as always); before a forward pass its current values are written into
the columns that the weights keep free for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pantheraml.base import log
from pantheraml.kernels.fp8_lora import LORA_COLUMNS, FP8Weights, fp8_lora_linear, quantise_weight, write_lora_columns
from pantheraml.models.quantise.lora import PackedLoraLinear

logger = log.get(__name__)


class FP8Linear(nn.Module):
    """A frozen `nn.Linear` with its weight in fp8."""

    qweight: Tensor
    """[out, in + LORA_COLUMNS] e4m3. PEFT finds a layer's device by this name."""
    qweight_t: Tensor
    scale: Tensor
    scale_t: Tensor
    lora_scale: Tensor
    lora_scale_t: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        for suffix, layout in (("", weight), ("_t", weight.T)):
            payload, scale = quantise_weight(layout.detach())
            self.register_buffer(f"qweight{suffix}", payload, persistent=False)
            self.register_buffer(f"scale{suffix}", scale, persistent=False)
            self.register_buffer(f"lora_scale{suffix}", torch.ones((), device=weight.device), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.with_adapter(x, None, None, 1.0)

    def with_adapter(self, x: Tensor, down: Tensor | None, up: Tensor | None, scaling: float) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        weights = FP8Weights(self.qweight, self.scale, self.lora_scale, self.qweight_t, self.scale_t, self.lora_scale_t)
        out = fp8_lora_linear(x.to(dtype), down, up, scaling, weights)
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FP8LoraLinear(PackedLoraLinear):
    """PEFT's LoRA layer over an FP8Linear: one product where it can, PEFT's own way where it must."""

    def why_not_fused(self) -> str | None:
        """Why this layer takes PEFT's plain path, or None if it is fused."""
        if self.disable_adapters or self.merged:
            return "its adapter is switched off or merged"
        if len(self.active_adapters) != 1 or self.active_adapters[0] not in self.lora_A:
            return "it has not exactly one active adapter"
        name = self.active_adapters[0]
        if self.training and not isinstance(self.lora_dropout[name], nn.Identity):
            return "it has dropout"
        if name in self.lora_magnitude_vector:
            return "it is DoRA"
        if self.lora_A[name].weight.shape[0] > LORA_COLUMNS:
            return f"its rank is above {LORA_COLUMNS}"
        if self.lora_B[name].bias is not None:
            return "its adapter has a bias"
        return None

    def refresh(self) -> None:
        """Write the adapter's current values into the weights.

        Always, and not only when they changed: fused optimizers change them without raising their version.
        """
        if self.why_not_fused() is not None:
            return
        name = self.active_adapters[0]
        down, up, scaling = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        base: FP8Linear = self.base_layer
        write_lora_columns(base.qweight, base.scale, up * scaling, base.lora_scale)
        write_lora_columns(base.qweight_t, base.scale_t, down.T, base.lora_scale_t)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.why_not_fused() is not None:
            return super().forward(x, *args, **kwargs)
        name = self.active_adapters[0]
        base: FP8Linear = self.base_layer
        return base.with_adapter(x, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])


def quantise_linears_fp8(model: Any, *, device: torch.device | None = None) -> int:
    """Turn every linear layer but the output head into fp8, one by one; how many there were."""
    head = model.get_output_embeddings()
    found = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    for name, layer in found:
        weight = layer.weight.detach().to(device)
        bias = None if layer.bias is None else layer.bias.detach().to(device)
        model.set_submodule(name, FP8Linear(weight, bias))
    return len(found)


def keep_fresh(model: nn.Module) -> int:
    """Refresh all fused layers before each forward pass of `model`; how many there are. Logs why others are not."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, FP8LoraLinear)]
    reasons = {reason for _, layer in layers if (reason := layer.why_not_fused()) is not None}
    for reason in sorted(reasons):
        logger.info("some adapter layers are not fused with their fp8 weights: %s", reason)

    def refresh(_module: nn.Module, _arguments: Any) -> None:
        for _, layer in layers:
            layer.refresh()

    if layers:
        model.register_forward_pre_hook(refresh)
    return len(layers)
