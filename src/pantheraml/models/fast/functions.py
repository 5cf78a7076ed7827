"""The differentiable pieces of a fused decoder layer.

Each is one autograd function over a stretch of the layer, so that what is kept for the backward pass is chosen by hand:
inputs of products stay in fp8, as the products saw them, and where those are normalised rows, the norm's gradient is
formed from them too; the hidden rows of the MLP are computed again from gate and up; residual sums and their gradients
ride along with the normalisation, and where layers follow each other, so do those between them. Where gate and up
were computed for this backward pass alone, their gradients are written over them, if they are of one dtype: that is the
most that a layer with activation checkpointing ever holds. For a norm that is trained the plain rows are kept as well:
where its weight is nought, fp8 rows do not tell what would have changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pantheraml.kernels.e4m3 import E4M3
from pantheraml.kernels.gated_activation import gated_activation, gated_activation_backward
from pantheraml.kernels.rms_norm import (
    Normed,
    Quantised,
    rms_norm,
    rms_norm_backward,
    rms_norm_backward_rows,
    rms_norm_weight_gradient,
)
from pantheraml.kernels.rotary import rotate, unrotate, unrotate_quantised
from pantheraml.models.fast.operand import Group, Operand


class Norm(NamedTuple):
    weight: Tensor
    epsilon: float
    plus_one: bool


class Heads(NamedTuple):
    queries: int
    keys: int
    size: int


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """x [rows, width], normalised, in its own dtype."""
    out: Tensor = _Normalised.apply(x, norm.weight, norm)
    return out


class Link:
    """Between two layers that follow each other. The first leaves the last sum to the second's norm, which forms it on
    its way; and on the way back that norm writes the sum's gradient as rows for the first's last product, `group`."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._given: tuple[Tensor, int, Operand] | None = None

    def give(self, gradient: Tensor, rows: Operand) -> None:
        self._given = gradient, gradient._version, rows

    def take(self, gradient: Tensor) -> Operand:
        """The rows of this gradient; they are formed here if it is not the one that they were given for."""
        given, self._given = self._given, None
        if given is not None and given[0] is gradient and given[1] == gradient._version:
            return given[2]
        return self.group.gradient_operand(gradient)


class Carried(NamedTuple):
    """What a layer has yet to add to its sum."""

    delta: Tensor
    link: Link


def attention_input(
    x: Tensor,
    norm: Norm,
    group: Group,
    turns: tuple[Tensor, Tensor] | None,
    heads: Heads,
    carried: Carried | None = None,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised x (+ what is carried) through the merged product: query and key (turned by `turns`, cos and sin, if
    given; with `in_place` in the product's output) and value, each [rows, heads, size], and x itself for the residual
    sum."""
    cos, sin = (None, None) if turns is None else turns
    delta, link = (None, None) if carried is None else carried
    out: tuple[Tensor, Tensor, Tensor, Tensor] = _AttentionInput.apply(
        x, norm.weight, delta, norm, group, cos, sin, heads, link, in_place, *group.parameters()
    )
    return out


def after_attention(x: Tensor, mixed: Tensor, norm: Norm, groups: Sequence[Group], *, gelu: bool) -> Tensor:
    """y + second(activation(gate) * up) with gate, up = first(norm(y)), for y = x + output(mixed) and `groups` of
    output, first and second."""
    out: Tensor = _AfterAttention.apply(x, norm.weight, mixed, norm, groups, gelu, None, *_parameters(groups))
    return out


def after_attention_apart(
    x: Tensor, mixed: Tensor, norm: Norm, groups: Sequence[Group], *, gelu: bool
) -> tuple[Tensor, Carried]:
    """y alone, and the rest carried to the next layer's `attention_input`."""
    link = Link(groups[-1])
    y, delta = _AfterAttention.apply(x, norm.weight, mixed, norm, groups, gelu, link, *_parameters(groups))
    return y, Carried(delta, link)


def _parameters(groups: Sequence[Group]) -> list[Any]:
    return [parameter for group in groups for parameter in group.parameters()]


_RECOMPUTED_BY: ContextVar[Any] = ContextVar("recomputed_by", default=None)
_RECOMPUTING: ContextVar[int] = ContextVar("recomputing", default=0)


class ToBeRecomputed:
    """While layers are run whose activations will be computed again by those who packed them: every backward pass then
    has its own, and may write over them. Not if somebody else keeps them in between, by saved tensors' hooks."""

    def __enter__(self) -> None:
        _RECOMPUTED_BY.set(_packer())

    def __exit__(self, *error: object) -> None:
        _RECOMPUTED_BY.set(None)


class Recomputing:
    """While layers are run a second time for their activations: the MLP's last product is left out. It can be entered
    again, as it is once for every backward pass, and by several threads."""

    def __enter__(self) -> None:
        _RECOMPUTING.set(_RECOMPUTING.get() + 1)

    def __exit__(self, *error: object) -> None:
        _RECOMPUTING.set(_RECOMPUTING.get() - 1)


def _packer() -> Any:
    """The hooks that saved tensors go to now; None: they are kept as they are."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _will_be_recomputed() -> bool:
    by = _RECOMPUTED_BY.get()
    return by is not None and by == _packer()


def _keep(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)


class _Unchanged:
    """Weights that the way back reads again, which must then be what they were."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._seen = [(weight, weight._version) for group in groups for weight in group.read_back()]

    def check(self) -> None:
        if any(weight._version != version for weight, version in self._seen):
            raise RuntimeError(
                "A weight was changed between the forward pass and its backward pass, whose gradients would be those"
                " of another model. Call backward before the optimizer's step."
            )


def _plain_rows(normed: Normed, trained: bool) -> Tensor | None:
    """What was normalised, if the norm's gradient needs it, or that of its weight."""
    return normed.total if trained or normed.scales is None else None


def _norm_rows(plain: Tensor | None, payload: Tensor, scales: Tensor | None) -> Tensor | Quantised:
    """What the norm's gradient is formed from."""
    if plain is not None:
        return plain
    assert scales is not None
    return Quantised(payload, scales)


def _weight_gradient(ctx: Any, g: Tensor, plain: Tensor | None, inverse: Tensor) -> Tensor | None:
    """Of the norm, whose weight is the second input of every piece."""
    if not ctx.needs_input_grad[1]:
        return None
    assert plain is not None
    return rms_norm_weight_gradient(g, plain, inverse, ctx.norm.weight.dtype)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, norm: Norm) -> Tensor:
        normed = rms_norm(x, norm.weight, norm.epsilon, plus_one=norm.plus_one, quantise=False)
        _keep(ctx, normed.total, normed.inverse)
        ctx.norm = norm
        return normed.payload

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, inverse = ctx.saved_tensors
        norm: Norm = ctx.norm
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rms_norm_backward(grads[0], x, norm.weight, inverse, plus_one=norm.plus_one)
        return dx, _weight_gradient(ctx, grads[0], x, inverse), None


class _AttentionInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _weight: Tensor,
        delta: Tensor | None,
        norm: Norm,
        group: Group,
        cos: Tensor | None,
        sin: Tensor | None,
        heads: Heads,
        link: Link | None,
        in_place: bool,
        *_parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        normed = rms_norm(
            x, norm.weight, norm.epsilon,
            delta=delta, room=group.room, plus_one=norm.plus_one, quantise=group.quantised,
        )  # fmt: skip
        merged, middle = group.forward(Operand(normed.payload, normed.scales))
        plain = _plain_rows(normed, ctx.needs_input_grad[1])
        _keep(ctx, plain, normed.payload, normed.scales, normed.inverse, middle, cos, sin)
        ctx.group, ctx.norm, ctx.link, ctx.unchanged = group, norm, link, _Unchanged([group])
        counts = (heads.queries, heads.keys, heads.keys)
        if cos is not None and sin is not None:
            return *rotate(merged, cos, sin, heads=counts, in_place=in_place), normed.total
        q, k, v = merged.unflatten(1, (-1, heads.size)).split(counts, dim=1)
        return q, k, v, normed.total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plain, payload, scales, inverse, middle, cos, sin = ctx.saved_tensors
        ctx.unchanged.check()
        group: Group = ctx.group
        norm: Norm = ctx.norm
        parts = grads[0], grads[1], grads[2]
        if cos is None:
            g = group.gradient_operand(torch.cat([part.flatten(1) for part in parts], dim=1))
        elif group.quantised:
            g = Operand(*unrotate_quantised(parts, cos, sin, room=group.room, multiplier=group.multiplier))
        else:
            g = Operand(unrotate(parts, cos, sin, room=group.room), None)
        wants_input = any(ctx.needs_input_grad[:3])
        d_normed, gradients = group.backward(g, Operand(payload, scales), middle, wants_input=wants_input)
        dx = d_weight = None
        link: Link | None = ctx.link
        if d_normed is not None:
            x = _norm_rows(plain, payload, scales)
            d_weight = _weight_gradient(ctx, d_normed, plain, inverse)
            if link is None:
                dx = rms_norm_backward(d_normed, x, norm.weight, inverse, plus_one=norm.plus_one, residual=grads[3])
            else:
                dx, rows = _gradient_and_rows(d_normed, x, norm, inverse, grads[3], link.group)
                link.give(dx, rows)
        return dx, d_weight, None if link is None else dx, None, None, None, None, None, None, None, *gradients


def _gradient_and_rows(
    d_normed: Tensor, x: Tensor | Quantised, norm: Norm, inverse: Tensor, residual: Tensor, group: Group
) -> tuple[Tensor, Operand]:
    """The gradient of what was normalised, and its rows as the gradient of `group`'s output."""
    dx, payload, scales = rms_norm_backward_rows(
        d_normed, x, norm.weight, inverse,
        plus_one=norm.plus_one, residual=residual, room=group.room, multiplier=group.multiplier,
        dtype=E4M3 if group.quantised else group.dtype,
    )  # fmt: skip
    return dx, Operand(payload, scales)


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _weight: Tensor,
        mixed: Tensor,
        norm: Norm,
        groups: Sequence[Group],
        gelu: bool,
        link: Link | None,
        *_parameters: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, first, second = groups
        rows = output.operand(mixed)
        delta, output_middle = output.forward(rows)
        normed = rms_norm(
            x, norm.weight, norm.epsilon,
            delta=delta, room=first.room, plus_one=norm.plus_one, quantise=first.quantised,
        )  # fmt: skip
        del delta
        pair, first_middle = first.forward(Operand(normed.payload, normed.scales))
        hidden = gated_activation(pair, room=second.room, gelu=gelu, quantise=second.quantised)
        if _RECOMPUTING.get():  # the layer's output is known already: what is missing is what backward needs
            out, second_middle = torch.zeros_like(x), second.begin_forward(Operand(*hidden))
        else:
            out, second_middle = second.forward(Operand(*hidden))
            if link is None:
                out = out + normed.total  # not in place: selective checkpointing keeps what products give
        _keep(
            ctx, *rows, output_middle, _plain_rows(normed, ctx.needs_input_grad[1]), normed.inverse,
            normed.payload, normed.scales, first_middle, pair, second_middle,
        )  # fmt: skip
        ctx.norm, ctx.groups, ctx.gelu, ctx.link, ctx.unchanged = norm, groups, gelu, link, _Unchanged(groups)
        ctx.pair_is_own = _will_be_recomputed()
        return out if link is None else (normed.total, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """The gradient of the sum; or those of both that it is formed of, which are one and the same."""
        g, link = grads[0], ctx.link
        rows, rows_scales, output_middle, plain, inverse, payload, scales, *others = ctx.saved_tensors
        first_middle, pair, second_middle = others
        ctx.unchanged.check()
        norm: Norm = ctx.norm
        output, first, second = ctx.groups
        g_second = second.gradient_operand(g) if link is None else link.take(grads[1])
        d_hidden, sides = second.begin_backward(g_second, second_middle)
        assert d_hidden is not None
        hidden, d_pair = gated_activation_backward(
            d_hidden, pair,
            multiplier=first.multiplier, rooms=(0, first.room), gelu=ctx.gelu, quantise=first.quantised,
            in_place=ctx.pair_is_own and not first.quantised and first.room == 0 and d_hidden.dtype == pair.dtype,
        )  # fmt: skip
        second_gradients = second.parameter_gradients(g_second, Operand(*hidden), sides)
        del d_hidden, hidden, g_second
        d_normed, first_gradients = first.backward(Operand(*d_pair), Operand(payload, scales), first_middle)
        assert d_normed is not None
        del d_pair
        d_weight = _weight_gradient(ctx, d_normed, plain, inverse)
        d_total, g_output = _gradient_and_rows(d_normed, _norm_rows(plain, payload, scales), norm, inverse, g, output)
        d_mixed, output_gradients = output.backward(
            g_output, Operand(rows, rows_scales), output_middle, wants_input=ctx.needs_input_grad[2]
        )
        gradients = *output_gradients, *first_gradients, *second_gradients
        return d_total, d_weight, d_mixed, None, None, None, None, *gradients
