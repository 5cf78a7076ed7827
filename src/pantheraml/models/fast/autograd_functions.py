"""The autograd Functions of a fused decoder layer.

Each Function covers a stretch of the layer, so saved tensors are chosen by hand. Matmul inputs are saved in fp8, as the
matmul read them; where they are normalized rows, the norm's gradient is computed from them as well. The MLP's hidden
rows are recomputed from gate and up. Residual adds and their gradients are fused into the norms, also across
consecutive layers. Under activation checkpointing, gate and up belong to one backward alone, so their gradients
overwrite them when the dtypes match: that is the peak memory of a checkpointed layer. A trainable norm also saves its
plain input: where its weight is zero, the fp8 rows do not determine the weight's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.fp8.e4m3 import E4M3
from pantheraml.kernels.gated_activation import gated_activation, gated_activation_backward
from pantheraml.kernels.rms_norm import (
    Normed,
    QuantizedRows,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.kernels.rotary import rope_backward, rope_backward_quantized, rope_forward
from pantheraml.models.fast.group_operand import ForwardGroup, LinearGroup, Operand


class Norm(NamedTuple):
    weight: Tensor
    epsilon: float
    plus_one: bool


class Heads(NamedTuple):
    queries: int
    keys: int
    size: int


def fused_rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """RMSNorm of x [rows, width], in its own dtype."""
    out: Tensor = _RMSNorm.apply(x, norm.weight, norm)
    return out


class ResidualLink:
    """Connects two consecutive layers so that the second layer's norm does the residual add of the first.

    In backward, that norm also writes the gradient of the sum as the operand of the first layer's last matmul, `group`.
    """

    def __init__(self, group: LinearGroup) -> None:
        self.group = group
        self._offered: tuple[Tensor, int, Operand] | None = None

    def offer(self, gradient: Tensor, rows: Operand) -> None:
        self._offered = gradient, gradient._version, rows

    def take(self, gradient: Tensor) -> Operand:
        """Return the operand for this gradient; build it here if the offered one is for another gradient."""
        offered, self._offered = self._offered, None
        if offered is not None and offered[0] is gradient and offered[1] == gradient._version:
            return offered[2]
        return self.group.gradient_operand(gradient)


class PendingResidual(NamedTuple):
    """The MLP output that a layer left for the next norm to add to the residual stream."""

    delta: Tensor
    link: ResidualLink


def attention_input(
    x: Tensor,
    norm: Norm,
    group: ForwardGroup,
    rope: tuple[Tensor, Tensor] | None,
    heads: Heads,
    pending: PendingResidual | None = None,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run RMSNorm (after adding `pending`) and the fused QKV matmul.

    Returns query and key (with RoPE if `rope`, cos and sin, is given; with `in_place` written into the matmul's output)
    and value, each [rows, heads, size], and x for the residual add.
    """
    cos, sin = (None, None) if rope is None else rope
    delta, link = (None, None) if pending is None else pending
    out: tuple[Tensor, Tensor, Tensor, Tensor] = _AttentionInput.apply(
        x, norm.weight, delta, norm, group, cos, sin, heads, link, in_place, *group.parameters()
    )
    return out


def after_attention(x: Tensor, attn_out: Tensor, norm: Norm, groups: Sequence[ForwardGroup], *, gelu: bool) -> Tensor:
    """Return y + second(activation(gate) * up), with gate, up = first(norm(y)) and y = x + output(attn_out).

    `groups` are output, first and second.
    """
    out: Tensor = _AfterAttention.apply(x, norm.weight, attn_out, norm, groups, gelu, None, *_parameters(groups))
    return out


def after_attention_deferred(
    x: Tensor, attn_out: Tensor, norm: Norm, groups: Sequence[LinearGroup], *, gelu: bool
) -> tuple[Tensor, PendingResidual]:
    """Return y alone, and leave the MLP's output to the next layer's `attention_input`."""
    link = ResidualLink(groups[-1])
    y, delta = _AfterAttention.apply(x, norm.weight, attn_out, norm, groups, gelu, link, *_parameters(groups))
    return y, PendingResidual(delta, link)


def _parameters(groups: Sequence[ForwardGroup]) -> list[Any]:
    return [parameter for group in groups for parameter in group.parameters()]


_CHECKPOINT_HOOKS: ContextVar[Any] = ContextVar("checkpoint_hooks", default=None)
_RECOMPUTING: ContextVar[int] = ContextVar("recomputing", default=0)


class CheckpointedForward:
    """Context of a forward under activation checkpointing, whose saved tensors will be recomputed.

    Every backward then has its own activations and may overwrite them, unless other saved-tensor hooks hold them
    meanwhile.
    """

    def __enter__(self) -> None:
        _CHECKPOINT_HOOKS.set(_active_saved_tensor_hooks())

    def __exit__(self, *error: object) -> None:
        _CHECKPOINT_HOOKS.set(None)


class CheckpointRecompute:
    """Context of the recomputation in backward: the MLP's last matmul is skipped.

    Reentrant, as it is entered once for every backward, and usable from several threads.
    """

    def __enter__(self) -> None:
        _RECOMPUTING.set(_RECOMPUTING.get() + 1)

    def __exit__(self, *error: object) -> None:
        _RECOMPUTING.set(_RECOMPUTING.get() - 1)


def _active_saved_tensor_hooks() -> Any:
    """Return the saved-tensor hooks in effect; None if saved tensors are stored as they are."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_checkpointed() -> bool:
    hooks = _CHECKPOINT_HOOKS.get()
    return hooks is not None and hooks == _active_saved_tensor_hooks()


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)


class _WeightVersions:
    """Versions of the weights that backward reads again, which must not change in between."""

    def __init__(self, groups: Sequence[ForwardGroup]) -> None:
        self._versions = [(weight, weight._version) for group in groups for weight in group.weights_read_in_backward()]

    def check(self) -> None:
        if any(weight._version != version for weight, version in self._versions):
            raise RuntimeError(
                "A weight was modified between forward and backward, so the gradients would be wrong. Call backward"
                " before the optimizer step."
            )


def _plain_norm_input(normed: Normed, trainable: bool) -> Tensor | None:
    """Return the norm's plain input if the gradient of its input or weight needs it."""
    return normed.total if trainable or normed.scales is None else None


def _norm_input(plain: Tensor | None, qdata: Tensor, scales: Tensor | None) -> Tensor | QuantizedRows:
    """Return the rows that the norm's gradient is computed from."""
    if plain is not None:
        return plain
    assert scales is not None
    return QuantizedRows(qdata, scales)


def _norm_weight_grad(ctx: Any, g: Tensor, plain: Tensor | None, inverse: Tensor) -> Tensor | None:
    """Return the gradient of the norm weight, which is the second input of every Function here."""
    if not ctx.needs_input_grad[1]:
        return None
    assert plain is not None
    return rms_norm_weight_gradient(g, plain, inverse, ctx.norm.weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, norm: Norm) -> Tensor:
        normed = rms_norm(x, norm.weight, norm.epsilon, plus_one=norm.plus_one, quantize=False)
        _save(ctx, normed.total, normed.inverse)
        ctx.norm = norm
        return normed.qdata

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, inverse = ctx.saved_tensors
        norm: Norm = ctx.norm
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rms_norm_backward(grads[0], x, norm.weight, inverse, plus_one=norm.plus_one)
        return dx, _norm_weight_grad(ctx, grads[0], x, inverse), None


class _AttentionInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _weight: Tensor,
        delta: Tensor | None,
        norm: Norm,
        group: ForwardGroup,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: Heads,
        link: ResidualLink | None,
        in_place: bool,
        *_parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normed = rms_norm(
            x, norm.weight, norm.epsilon,
            delta=delta, pad_cols=group.pad_cols, plus_one=norm.plus_one, quantize=group.quantized,
        )  # fmt: skip
        merged, lora_mid = group.forward(Operand(normed.qdata, normed.scales))
        plain = _plain_norm_input(normed, ctx.needs_input_grad[1])
        _save(ctx, plain, normed.qdata, normed.scales, normed.inverse, lora_mid, cos, sin)
        ctx.group, ctx.norm, ctx.link, ctx.weight_versions = group, norm, link, _WeightVersions([group])
        counts = (heads.queries, heads.keys, heads.keys)
        if cos is not None and sin is not None:
            return *rope_forward(merged, cos, sin, heads=counts, in_place=in_place), normed.total
        q, k, v = merged.unflatten(1, (-1, heads.size)).split(counts, dim=1)
        return q, k, v, normed.total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plain, qdata, scales, inverse, lora_mid, cos, sin = ctx.saved_tensors
        ctx.weight_versions.check()
        group: LinearGroup = ctx.group
        norm: Norm = ctx.norm
        parts = grads[0], grads[1], grads[2]
        if cos is None:
            g = group.gradient_operand(torch.cat([part.flatten(1) for part in parts], dim=1))
        elif group.quantized:
            g = Operand(*rope_backward_quantized(parts, cos, sin, pad_cols=group.pad_cols, multiplier=group.multiplier))
        else:
            g = Operand(rope_backward(parts, cos, sin, pad_cols=group.pad_cols), None)
        needs_input_grad = any(ctx.needs_input_grad[:3])
        d_normed, gradients = group.backward(g, Operand(qdata, scales), lora_mid, needs_input_grad=needs_input_grad)
        dx = d_weight = None
        link: ResidualLink | None = ctx.link
        if d_normed is not None:
            x = _norm_input(plain, qdata, scales)
            d_weight = _norm_weight_grad(ctx, d_normed, plain, inverse)
            if link is None:
                dx = rms_norm_backward(d_normed, x, norm.weight, inverse, plus_one=norm.plus_one, residual=grads[3])
            else:
                dx, rows = _input_grad_and_operand(d_normed, x, norm, inverse, grads[3], link.group)
                link.offer(dx, rows)
        return dx, d_weight, None if link is None else dx, None, None, None, None, None, None, None, *gradients


def _input_grad_and_operand(
    d_normed: Tensor, x: Tensor | QuantizedRows, norm: Norm, inverse: Tensor, residual: Tensor, group: LinearGroup
) -> tuple[Tensor, Operand]:
    """Return the gradient of the norm's input, also as the gradient operand of `group`'s output."""
    dx, qdata, scales = rms_norm_backward_rows(
        d_normed, x, norm.weight, inverse,
        plus_one=norm.plus_one, residual=residual, pad_cols=group.pad_cols, multiplier=group.multiplier,
        dtype=E4M3 if group.quantized else group.dtype,
    )  # fmt: skip
    return dx, Operand(qdata, scales)


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _weight: Tensor,
        attn_out: Tensor,
        norm: Norm,
        groups: Sequence[ForwardGroup],
        gelu: bool,
        link: ResidualLink | None,
        *_parameters: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, first, second = groups
        rows = output.operand(attn_out)
        delta, output_lora_mid = output.forward(rows)
        normed = rms_norm(
            x, norm.weight, norm.epsilon,
            delta=delta, pad_cols=first.pad_cols, plus_one=norm.plus_one, quantize=first.quantized,
        )  # fmt: skip
        del delta
        gate_up, first_lora_mid = first.forward(Operand(normed.qdata, normed.scales))
        hidden = gated_activation(gate_up, pad_cols=second.pad_cols, gelu=gelu, quantize=second.quantized)
        if _RECOMPUTING.get():  # the layer's output is known: only the saved tensors are needed
            out, second_lora_mid = torch.zeros_like(x), second.begin_forward(Operand(*hidden))
        else:
            out, second_lora_mid = second.forward(Operand(*hidden))
            if link is None:
                out = out + normed.total  # not in place: selective checkpointing stores matmul outputs
        _save(
            ctx, *rows, output_lora_mid, _plain_norm_input(normed, ctx.needs_input_grad[1]), normed.inverse,
            normed.qdata, normed.scales, first_lora_mid, gate_up, second_lora_mid,
        )  # fmt: skip
        ctx.norm, ctx.groups, ctx.gelu, ctx.link, ctx.weight_versions = (
            norm,
            groups,
            gelu,
            link,
            _WeightVersions(groups),
        )
        ctx.owns_gate_up = _is_checkpointed()
        return out if link is None else (normed.total, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Take the gradient of the sum, or of both its terms with a link: those are one tensor."""
        g, link = grads[0], ctx.link
        rows, rows_scales, output_lora_mid, plain, inverse, qdata, scales, *others = ctx.saved_tensors
        first_lora_mid, gate_up, second_lora_mid = others
        ctx.weight_versions.check()
        norm: Norm = ctx.norm
        output, first, second = ctx.groups
        g_second = second.gradient_operand(g) if link is None else link.take(grads[1])
        d_hidden, lora_operands = second.begin_backward(g_second, second_lora_mid)
        assert d_hidden is not None
        in_place = ctx.owns_gate_up and not first.quantized and first.pad_cols == 0 and d_hidden.dtype == gate_up.dtype
        hidden, d_gate_up = gated_activation_backward(
            d_hidden, gate_up,
            multiplier=first.multiplier, pad_cols=(0, first.pad_cols), gelu=ctx.gelu, quantize=first.quantized,
            in_place=in_place,
        )  # fmt: skip
        second_gradients = second.parameter_gradients(g_second, Operand(*hidden), lora_operands)
        del d_hidden, hidden, g_second
        d_normed, first_gradients = first.backward(Operand(*d_gate_up), Operand(qdata, scales), first_lora_mid)
        assert d_normed is not None
        del d_gate_up
        d_weight = _norm_weight_grad(ctx, d_normed, plain, inverse)
        d_total, g_output = _input_grad_and_operand(
            d_normed, _norm_input(plain, qdata, scales), norm, inverse, g, output
        )
        d_attn_out, output_gradients = output.backward(
            g_output, Operand(rows, rows_scales), output_lora_mid, needs_input_grad=ctx.needs_input_grad[2]
        )
        gradients = *output_gradients, *first_gradients, *second_gradients
        return d_total, d_weight, d_attn_out, None, None, None, None, *gradients
