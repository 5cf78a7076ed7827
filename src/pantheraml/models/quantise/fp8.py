"""FP8: frozen linear layers in e4m3, with one scale for all outputs or, where they are too unlike, one for each.

One copy of the weight serves both directions: the backward pass transposes its bytes just before the product (see
`kernels.fp8_product`), and the scales, which then lie along the inner dimension, go into the gradient before it is
quantised. No gradient of the weight is ever needed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.e4m3 import E4M3, LIMIT, SMALLEST_SCALE, shared_scale, to_e4m3
from pantheraml.kernels.fp8_product import fp8_product, transposed
from pantheraml.kernels.quantise_rows import quantise_rows
from pantheraml.models.quantise.lora import PackedLoraLinear
from pantheraml.models.quantise.nf4 import plain_linear

_PIECE = 8192
TENSOR_CORE = 16
"""Sizes of fp8 products must be multiples of this."""


class FP8Linear(nn.Module):
    """A frozen `nn.Linear` with its weight in fp8."""

    qweight: Tensor
    """[out, in] e4m3, rows maybe further apart than `in`. PEFT finds a layer's device by this name."""
    scale: Tensor
    """[out] float32."""
    bias: Tensor | None
    dense_dtype = torch.bfloat16
    """Of a plain layer that takes its place."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, scales: Literal["one", "rows"] | None = None) -> None:
        """`scales`: one for all outputs, or one for each; None: one, unless outputs are too unlike."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        payload, scale = _quantise(weight.detach(), scales)
        self.shared_scale = bool((scale == scale[0]).all())
        """All outputs have the same scale."""
        self.register_buffer("qweight", payload, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """A plain layer with the weight that e4m3 left of the original."""
        dense = torch.empty(self.qweight.shape, dtype=dtype, device=self.qweight.device)
        for out, rows, scale in zip(*(whole.split(_PIECE) for whole in (dense, self.qweight, self.scale)), strict=True):
            out.copy_(rows.float() * scale[:, None])
        return plain_linear(dense, self.bias, from_conv1d=False)

    def keep_rows(self, rows: slice) -> None:
        """Become the layer of these outputs alone."""
        self._keep(self.qweight[rows])
        self.scale = self.scale[rows].clone()
        self.bias = None if self.bias is None else self.bias[rows].clone()

    def keep_columns(self, columns: slice) -> None:
        """Become the layer of these inputs alone. The bias stays."""
        self._keep(self.qweight[:, columns])

    def _keep(self, part: Tensor) -> None:
        if part.is_cuda and any(size % TENSOR_CORE for size in part.shape):
            raise UnsupportedModelError(
                f"An fp8 layer cannot be cut to {part.shape[0]} outputs of {part.shape[1]} inputs:"
                f" the tensor cores take multiples of {TENSOR_CORE}.",
                todo="Use a smaller parallel.tensor, or model.precision=bf16.",
            )
        self.qweight = part.clone(memory_format=torch.contiguous_format)
        self.out_features, self.in_features = part.shape

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.reshape(-1, self.in_features).to(dtype)
        out: Tensor = _Product.apply(rows, self.qweight, self.scale)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _quantise(weight: Tensor, scales: Literal["one", "rows"] | None) -> tuple[Tensor, Tensor]:
    """Scales of single rows are no powers of two: so rows that were in e4m3 before, with any scales, are not rounded
    again."""
    largest = torch.cat([rows.abs().amax(dim=1).float() for rows in weight.split(_PIECE)])
    shared = None if scales == "rows" else shared_scale(largest if scales is None else largest.amax()[None])
    each = (largest / LIMIT).clamp(min=SMALLEST_SCALE) if shared is None else shared.repeat(weight.shape[0])
    payload = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    pieces = (whole.split(_PIECE) for whole in (weight, each, payload))
    for rows, scale, out in zip(*pieces, strict=True):  # no float32 copy of all of it
        out.copy_(to_e4m3(rows.float() / scale[:, None]))
    return payload, each


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, qweight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(qweight, scale)
        return fp8_product(*quantise_rows(x), qweight, scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        qweight, scale = ctx.saved_tensors
        (g,) = grads
        return fp8_product(*quantise_rows(g, multiplier=scale), transposed(qweight), None, g.dtype), None, None


class FP8LoraLinear(PackedLoraLinear):
    """PEFT's LoRA layer over an FP8Linear. `models.fast` makes one product of the two."""


def quantise_head(model: Any) -> bool:
    """Turn the output head of a transformers model into fp8 with one scale, if it is a frozen linear layer without
    bias; whether it was. A head that shares its weight with the embedding becomes a copy."""
    head = model.get_output_embeddings()
    kind = type(head)
    if kind is not nn.Linear or head.bias is not None or head.weight.requires_grad:
        return False
    if head.in_features % TENSOR_CORE or head.out_features % TENSOR_CORE:
        return False
    packed = FP8Linear(head.weight, None, scales="one")
    packed.dense_dtype = head.weight.dtype
    model.set_output_embeddings(packed)
    return True
