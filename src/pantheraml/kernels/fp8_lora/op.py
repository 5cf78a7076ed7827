"""y = x W' + s (x A') B' with W frozen in fp8: base and adapter leave the tensor cores as one product.

The adapter rides along as extra columns of the inner dimension: [x | x A'] times [W | s B] transposed. All of it is fp8
(e4m3) with one scale per row of either side, so the adapter costs neither a second pass over the output nor a kernel of
its own. In the backward pass dx = g W + s (g B) A is the same trick on the transposed weight, [g | s g B] times
[W' | A'] transposed; W needs no gradient, and those of A and B are small products in bf16.

128 columns are added, of which the rank uses the first few: with 16, rows are no longer aligned to what the tensor
cores read at once, and the products became a fifth slower (measured on an H200, 8 layers of Llama-3.1-8B's shape, 8,192
tokens: 46.6 ms of products with 16 extra columns, 39.0 ms with 128; the whole step without the head took 74.4 ms, and
84.7 ms with the adapter added by a separate kernel).

On a CPU the same numbers come from float32 products of the dequantised values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest e4m3 value; a cast of anything larger gives NaN, so values are clamped first."""
LORA_COLUMNS = 128


def quantise_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and one float32 scale per row, [rows, 1]."""
    scale = row_scale(values)
    return (values.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


def row_scale(values: Tensor) -> Tensor:
    return values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) * (1 / LARGEST)


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight with room for the adapter: [rows, columns + LORA_COLUMNS] e4m3, and its scales as [1, rows]."""
    payload, scale = quantise_rows(weight)
    wide = torch.zeros(weight.shape[0], weight.shape[1] + LORA_COLUMNS, dtype=E4M3, device=weight.device)
    wide[:, : weight.shape[1]] = payload
    return wide, scale.T.contiguous()


@torch.no_grad()
def write_lora_columns(wide: Tensor, scale: Tensor, factor: Tensor, lora_scale: Tensor) -> None:
    """Put `factor` ([rows, rank], the adapter's side of this weight) into the columns kept free for it.

    It shares the weight's row scales, and `lora_scale` (a scalar, written too) brings its largest value to the end of
    e4m3's range; the other side of the product is multiplied by it. So nothing is ever clamped, and what vanishes is
    some 10^5 times smaller than the adapter's largest contribution.
    """
    first = wide.shape[1] - LORA_COLUMNS
    values = factor.float() / scale.T
    lora_scale.copy_(values.abs().amax().clamp(min=1e-12) * (1 / LARGEST))
    wide[:, first : first + factor.shape[1]] = (values / lora_scale).clamp(-LARGEST, LARGEST).to(E4M3)


class FP8Weights(NamedTuple):
    """A frozen weight in the two layouts that the products need, each with its scales and its adapter's scale."""

    forward: Tensor
    scale: Tensor
    lora_scale: Tensor
    backward: Tensor
    scale_t: Tensor
    lora_scale_t: Tensor


def fp8_lora_linear(x: Tensor, down: Tensor | None, up: Tensor | None, scaling: float, weights: FP8Weights) -> Tensor:
    """x [..., in] -> [..., out], with the adapter's columns written into `weights`; without an adapter (`down` and `up`
    None) they stay unused."""
    rows = x.reshape(-1, x.shape[-1])
    if down is None or up is None:
        out: Tensor = _Frozen.apply(rows, *weights)
    else:
        out = _WithAdapter.apply(rows, down.to(x.dtype), up.to(x.dtype), scaling, *weights)
    return out.view(*x.shape[:-1], -1)


def _product(values: Tensor, lora: Tensor | None, wide: Tensor, wide_scale: Tensor, lora_scale: Tensor) -> Tensor:
    """[values | lora] times `wide` transposed, both in fp8; `lora` None leaves those columns zero."""
    extra = values.new_zeros(values.shape[0], 0).float() if lora is None else lora.float() * lora_scale
    joined = torch.cat([values.float(), F.pad(extra, (0, LORA_COLUMNS - extra.shape[1]))], dim=1)
    payload, scale = quantise_rows(joined)
    if values.is_cuda:
        return torch._scaled_mm(
            payload, wide.T, scale_a=scale, scale_b=wide_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return ((payload.float() @ wide.float().T) * scale * wide_scale).to(values.dtype)


class _WithAdapter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor, up: Tensor, scaling: float, *weights: Tensor) -> Tensor:
        wide, scale, lora_scale, *transposed = weights
        middle = x @ down.T
        ctx.save_for_backward(x, middle, up, *transposed)
        ctx.scaling = scaling
        return _product(x, middle, wide, scale, lora_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, middle, up, *transposed = ctx.saved_tensors
        (g,) = grads
        back = (g @ up) * ctx.scaling
        d_down = back.T @ x
        d_up = (g.T @ middle) * ctx.scaling
        return _product(g, back, *transposed), d_down, d_up, None, *(None,) * len(FP8Weights._fields)


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        wide, scale, lora_scale, *transposed = weights
        ctx.save_for_backward(*transposed)
        return _product(x, None, wide, scale, lora_scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _product(grads[0], None, *ctx.saved_tensors), *(None,) * len(FP8Weights._fields)
