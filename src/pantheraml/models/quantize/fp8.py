"""Frozen linear layers in fp8 (e4m3), with one scale per tensor, or per output row where rows differ too much.

One copy of the weight serves forward and backward: the backward transposes its bytes just before the matmul (see
`kernels.fp8.matmul`), and the scales, which then lie along the inner dimension, are folded into the gradient before it
is quantized. Weight gradients are never needed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.kernels.fp8.e4m3 import E4M3, LIMIT, MIN_SCALE, shared_scale, to_e4m3
from pantheraml.kernels.fp8.matmul import fp8_matmul, transposed
from pantheraml.kernels.fp8.quantize_rows import quantize_rows
from pantheraml.models.quantize.nf4 import plain_linear
from pantheraml.models.quantize.quantized_lora import QuantizedLoraLinear

_CHUNK_ROWS = 8192
TENSOR_CORE = 16
"""Dimensions of fp8 matmuls must be multiples of this."""


class FP8Linear(nn.Module):
    """A frozen `nn.Linear` with its weight in fp8."""

    qweight: Tensor
    """[out, in] e4m3; the row stride may exceed `in`. PEFT finds a layer's device by this name."""
    scale: Tensor
    """[out] float32."""
    bias: Tensor | None
    dense_dtype = torch.bfloat16
    """Dtype when dequantized to a plain layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, scales: Literal["one", "rows"] | None = None) -> None:
        """`scales`: one per tensor or one per row; None: per tensor unless rows differ too much."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        qdata, scale = _quantize(weight.detach(), scales)
        self.shared_scale = bool((scale == scale[0]).all())
        """All rows have the same scale."""
        self.register_buffer("qweight", qdata, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, (out_features, in_features)."""
        dense = torch.empty(self.qweight.shape, dtype=dtype, device=self.qweight.device)
        for out, rows, scale in zip(*(t.split(_CHUNK_ROWS) for t in (dense, self.qweight, self.scale)), strict=True):
            out.copy_(rows.float() * scale[:, None])
        return dense

    def to_linear(self, dtype: torch.dtype) -> nn.Module:
        """Dequantize to a plain layer."""
        return plain_linear(self.dequantize(dtype), self.bias, from_conv1d=False)

    def keep_rows(self, rows: slice) -> None:
        """Keep only these output rows."""
        self._set_weight(self.qweight[rows])
        self.scale = self.scale[rows].clone()
        self.bias = None if self.bias is None else self.bias[rows].clone()

    def keep_columns(self, columns: slice) -> None:
        """Keep only these input columns. The bias is unchanged."""
        self._set_weight(self.qweight[:, columns])

    def _set_weight(self, part: Tensor) -> None:
        if part.is_cuda and any(size % TENSOR_CORE for size in part.shape):
            raise UnsupportedModelError(
                f"An fp8 layer cannot be sharded to {part.shape[0]} outputs x {part.shape[1]} inputs:"
                f" fp8 tensor cores need multiples of {TENSOR_CORE}.",
                fix="Use a smaller parallel.tensor, or model.precision=bf16.",
            )
        self.qweight = part.clone(memory_format=torch.contiguous_format)
        self.out_features, self.in_features = part.shape

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        rows = x.reshape(-1, self.in_features).to(dtype)
        out: Tensor = _FP8Matmul.apply(rows, self.qweight, self.scale)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _quantize(weight: Tensor, scales: Literal["one", "rows"] | None) -> tuple[Tensor, Tensor]:
    """Return (qdata, scales). Row scales are not powers of two, so that rows that were e4m3 before, with any scales,
    are not rounded again."""
    largest = torch.cat([rows.abs().amax(dim=1).float() for rows in weight.split(_CHUNK_ROWS)])
    shared = None if scales == "rows" else shared_scale(largest if scales is None else largest.amax()[None])
    each = (largest / LIMIT).clamp(min=MIN_SCALE) if shared is None else shared.repeat(weight.shape[0])
    qdata = torch.empty(weight.shape, dtype=E4M3, device=weight.device)
    chunks = (tensor.split(_CHUNK_ROWS) for tensor in (weight, each, qdata))
    for rows, scale, out in zip(*chunks, strict=True):  # avoids a float32 copy of the whole weight
        out.copy_(to_e4m3(rows.float() / scale[:, None]))
    return qdata, each


class _FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, qweight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(qweight, scale)
        return fp8_matmul(*quantize_rows(x), qweight, scale, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        qweight, scale = ctx.saved_tensors
        (g,) = grads
        return fp8_matmul(*quantize_rows(g, multiplier=scale), transposed(qweight), None, g.dtype), None, None


class FP8LoraLinear(QuantizedLoraLinear):
    """PEFT's LoRA layer over an FP8Linear. `models.fast` fuses base and adapter into one matmul."""


class FP8Head(FP8Linear):
    """An output head in fp8. Trainers may read its `weight`, and multiply the hidden states by it themselves."""

    _dense: TensorWeakRef | None = None

    @property
    def weight(self) -> Tensor:
        """The dequantized weight. It exists only while someone holds it, such as autograd for a backward."""
        known = None if self._dense is None else self._dense()
        if known is not None and known.device == self.qweight.device:
            return known
        dense = self.dequantize(self.dense_dtype)
        self._dense = TensorWeakRef(dense)
        return dense

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_dense"}


def quantize_head(model: Any) -> bool:
    """Quantize the output head to fp8 with one scale, if it is a frozen linear layer without bias; return whether it
    was.

    A head tied to the embedding becomes a copy.
    """
    head = model.get_output_embeddings()
    kind = type(head)
    if kind is not nn.Linear or head.bias is not None or head.weight.requires_grad:
        return False
    if head.in_features % TENSOR_CORE or head.out_features % TENSOR_CORE:
        return False
    quantized = FP8Head(head.weight, None, scales="one")
    quantized.dense_dtype = head.weight.dtype
    model.set_output_embeddings(quantized)
    return True
