"""The autograd Functions of a fused decoder layer.

Each Function covers a stretch of the layer, so saved tensors are chosen by hand. Normalized rows are saved in fp8, as
the matmul read them, and their norm's gradient is computed from them as well. Attention saves its own output, so the
rows for the output projection are made from it again: by count 0.3 % of a step, for 1 GiB less with the shape of
Llama-3.1-8B. The MLP's hidden rows are recomputed from gate and up. Residual adds and their gradients are fused into
the norms, also across consecutive layers. Under activation checkpointing, gate and up belong to one backward alone, so
their gradients overwrite them when the dtypes match: that is the peak memory of a checkpointed layer. A trainable norm
also saves its plain input: where its weight is zero, the fp8 rows do not determine the weight's gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pantheraml.kernels.gated_activation import gated_activation, gated_activation_backward
from pantheraml.kernels.head_norm_rope import HeadNorms, head_norm_rope, head_norm_rope_backward
from pantheraml.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_weight_gradient
from pantheraml.kernels.rotary import rope_backward, rope_backward_quantized, rope_forward
from pantheraml.models.fast.group_operand import ForwardGroup, LinearGroup, Operand
from pantheraml.models.fast.part_norms import PartNorms
from pantheraml.models.fast.residual_branch import PLAIN, Branch, Norm
from pantheraml.models.fast.stream_reader import StreamGradient, norm_rows, read_stream


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
    branch: Branch


class QKV(NamedTuple):
    """The fused QKV matmul, and what happens to its output besides RoPE."""

    group: ForwardGroup
    heads: Heads
    norms: HeadNorms | PartNorms | None = None
    """Norms of queries and keys before RoPE: of every head, or others."""
    keep_input: tuple[bool, bool] = (False, False)
    """Whether backward takes the normalized query and key heads from the norms' input instead of the output."""
    in_place: bool = False
    """Write query and key into the matmul's output."""


def attention_input(
    x: Tensor,
    norm: Norm | None,
    qkv: QKV,
    rope: tuple[Tensor, Tensor] | None,
    pending: PendingResidual | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run RMSNorm, if any (after adding `pending`), and the fused QKV matmul.

    Returns query and key (with RoPE if `rope`, cos and sin, is given) and value, each [rows, heads, size], and x for
    the residual add.
    """
    cos, sin = (None, None) if rope is None else rope
    delta, link, branch = (None, None, PLAIN) if pending is None else pending
    weights = (None, None) if qkv.norms is None else (qkv.norms.query, qkv.norms.key)
    out: tuple[Tensor, Tensor, Tensor, Tensor] = _AttentionInput.apply(
        x, _weight_of(norm), delta, branch.weight, *weights, norm, branch, qkv, cos, sin, link, *qkv.group.parameters()
    )
    return out


def _weight_of(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight


class AfterAttention(NamedTuple):
    """The part of a layer after attention: y = x + attention branch(output(attn_out)), then y + MLP branch(second(
    activation(gate) * up)), with gate, up = first(norm(y))."""

    norm: Norm | None
    groups: Sequence[ForwardGroup]
    """Output, first and second."""
    gelu: bool
    branches: tuple[Branch, Branch] = (PLAIN, PLAIN)


def after_attention_whole(x: Tensor, attn_out: Tensor, rest: AfterAttention) -> Tensor:
    weights = _weight_of(rest.norm), rest.branches[0].weight, rest.branches[1].weight
    out: Tensor = _AfterAttention.apply(x, attn_out, *weights, rest, None, *parameters_of(rest.groups))
    return out


def after_attention_deferred(x: Tensor, attn_out: Tensor, rest: AfterAttention) -> tuple[Tensor, PendingResidual]:
    """Return y alone, and leave the MLP's output to the next layer's `attention_input`."""
    link = ResidualLink(cast(LinearGroup, rest.groups[-1]))
    weights = _weight_of(rest.norm), rest.branches[0].weight, None
    y, delta = _AfterAttention.apply(x, attn_out, *weights, rest, link, *parameters_of(rest.groups))
    return y, PendingResidual(delta, link, rest.branches[1])


def parameters_of(groups: Sequence[ForwardGroup]) -> list[Any]:
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


def is_recomputing() -> bool:
    return _RECOMPUTING.get() > 0


def in_lean_checkpoint() -> bool:
    """Return whether this is a forward whose activations are recomputed, or their recomputation."""
    return _CHECKPOINT_HOOKS.get() is not None or is_recomputing()


_OWNED: ContextVar[bool] = ContextVar("owned", default=False)


@contextlib.contextmanager
def owned_activations() -> Iterator[None]:
    """Context of a forward whose activations are for one backward alone, and whose output is not needed."""
    token = _OWNED.set(True)
    try:
        with CheckpointRecompute():
            yield
    finally:
        _OWNED.reset(token)


def _active_saved_tensor_hooks() -> Any:
    """Return the saved-tensor hooks in effect; None if saved tensors are stored as they are."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _is_checkpointed() -> bool:
    hooks = _CHECKPOINT_HOOKS.get()
    return _OWNED.get() or (hooks is not None and hooks == _active_saved_tensor_hooks())


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
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = rms_norm_weight_gradient(grads[0], x, inverse, norm.weight.dtype)
        return dx, d_weight, None


class _AttentionInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        _weight: Tensor | None,
        delta: Tensor | None,
        _branch_weight: Tensor | None,
        _query_weight: Tensor | None,
        _key_weight: Tensor | None,
        norm: Norm | None,
        branch: Branch,
        qkv: QKV,
        cos: Tensor | None,
        sin: Tensor | None,
        link: ResidualLink | None,
        *_parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        group, heads = qkv.group, qkv.heads
        added, branch_inverse = (None, None) if delta is None else branch.forward(delta)
        read = read_stream(x, norm, group, added)
        del added
        merged, lora_mid = group.forward(read.operand)
        plain = read.plain_norm_input(norm, ctx.needs_input_grad[1])
        ctx.qkv, ctx.norm, ctx.branch, ctx.link = qkv, norm, branch, link
        ctx.weight_versions = _WeightVersions([group])
        counts = (heads.queries, heads.keys, heads.keys)
        saved_heads: tuple[Tensor, ...] = ()
        if isinstance(qkv.norms, PartNorms):
            merged, saved_heads = qkv.norms.forward(merged)
        if cos is None or sin is None:
            q, k, v = merged.unflatten(1, (-1, heads.size)).split(counts, dim=1)
        elif not isinstance(qkv.norms, HeadNorms):
            q, k, v = rope_forward(merged, cos, sin, heads=counts, in_place=qkv.in_place)
        else:
            rows = head_norm_rope(
                merged, qkv.norms, cos, sin, heads=counts, keep_input=qkv.keep_input, in_place=qkv.in_place
            )
            q, k, v, saved_heads = *rows[:3], (*rows.saved, rows.inverse)
        saved_delta = None if delta is None else branch.saved(delta)
        _save(
            ctx, plain, *read.operand, read.inverse, lora_mid, cos, sin, saved_delta, branch_inverse,
            *saved_heads,
        )  # fmt: skip
        return q, k, v, read.total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plain, qdata, scales, inverse, lora_mid, cos, sin, delta, branch_inverse, *saved_heads = ctx.saved_tensors
        ctx.weight_versions.check()
        group, norm, branch, link = ctx.qkv.group, ctx.norm, ctx.branch, ctx.link
        g, head_weights = _heads_gradient(ctx, (grads[0], grads[1], grads[2]), cos, sin, saved_heads)
        needs_input_grad = any(ctx.needs_input_grad[:4])
        read = Operand(qdata, scales)
        d_rows, gradients = group.backward(g, read, lora_mid, needs_input_grad=needs_input_grad)
        dx = d_weight = d_delta = d_branch = None
        if d_rows is not None:
            gradient = StreamGradient(d_rows, norm, norm_rows(norm, plain, read), inverse, grads[3])
            d_weight = gradient.of_weight(plain) if ctx.needs_input_grad[1] else None
            if link is not None and branch.is_plain:
                dx, rows = gradient.of_stream_and_operand(link.group)
                d_delta = dx
            else:
                dx = gradient.of_stream()
                if link is not None:
                    d_delta, rows = branch.backward(dx, delta, branch_inverse, link.group)
            if link is not None:
                link.offer(d_delta, rows)
            if ctx.needs_input_grad[3]:
                d_branch = branch.weight_gradient(dx, delta, branch_inverse)
        return dx, d_weight, d_delta, d_branch, *head_weights, None, None, None, None, None, None, *gradients


def _heads_gradient(
    ctx: Any, parts: tuple[Tensor, Tensor, Tensor], cos: Tensor | None, sin: Tensor | None, saved_heads: Sequence[Any]
) -> tuple[Operand, tuple[Tensor | None, Tensor | None]]:
    """Return the gradient of the QKV matmul's output as the operand of its backward, and those of the head norms."""
    qkv: QKV = ctx.qkv
    group = cast(LinearGroup, qkv.group)  # a pass that is differentiated has no frozen groups
    no_weights = None, None
    if isinstance(qkv.norms, PartNorms):
        merged = _merged(parts) if cos is None or sin is None else rope_backward(parts, cos, sin)
        rows, weights = qkv.norms.backward(merged, tuple(saved_heads), weights=any(ctx.needs_input_grad[4:6]))
        return group.gradient_operand(rows), weights
    if cos is None or sin is None:
        return group.gradient_operand(_merged(parts)), no_weights
    if qkv.norms is not None:
        q, k, inverse = saved_heads
        gradient = head_norm_rope_backward(
            parts, (q, k), inverse, qkv.norms, cos, sin,
            kept_input=qkv.keep_input, quantize=group.quantized, pad_cols=group.pad_cols,
            multiplier=group.multiplier if group.quantized else None, weights=any(ctx.needs_input_grad[4:6]),
        )  # fmt: skip
        operand = Operand(gradient.rows, gradient.scales)
        if gradient.weights is None:
            return operand, no_weights
        query, key = gradient.weights
        return operand, (query.to(qkv.norms.query.dtype), key.to(qkv.norms.key.dtype))
    if group.quantized:
        quantized = rope_backward_quantized(parts, cos, sin, pad_cols=group.pad_cols, multiplier=group.multiplier)
        return Operand(*quantized), no_weights
    return Operand(rope_backward(parts, cos, sin, pad_cols=group.pad_cols), None), no_weights


def _merged(parts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1)


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attn_out: Tensor,
        _weight: Tensor | None,
        _attention_weight: Tensor | None,
        _mlp_weight: Tensor | None,
        rest: AfterAttention,
        link: ResidualLink | None,
        *_parameters: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        output, first, second = rest.groups
        norm, (attention_branch, mlp_branch) = rest.norm, rest.branches
        attn_delta, output_lora_mid = output.forward(output.operand(attn_out))
        added, branch_inverse = attention_branch.forward(attn_delta)
        delta = attention_branch.saved(attn_delta)
        del attn_delta
        read = read_stream(x, norm, first, added)
        del added
        gate_up, first_lora_mid = first.forward(read.operand)
        hidden = gated_activation(gate_up, pad_cols=second.pad_cols, gelu=rest.gelu, quantize=second.quantized)
        mlp_delta = mlp_inverse = None
        if _RECOMPUTING.get() and mlp_branch.norm is None:  # the output is known: only the saved tensors are needed
            out: Tensor = torch.zeros_like(x)
            second_lora_mid = second.begin_forward(Operand(*hidden))
        else:
            out, second_lora_mid = second.forward(Operand(*hidden))
            if link is None:
                mlp_delta = mlp_branch.saved(out)
                added, mlp_inverse = mlp_branch.forward(out)
                out = added + read.total  # not in place: selective checkpointing stores matmul outputs
        plain = read.plain_norm_input(norm, ctx.needs_input_grad[2])
        _save(
            ctx, attn_out, output_lora_mid, delta, branch_inverse, plain, read.inverse, *read.operand,
            first_lora_mid, gate_up, second_lora_mid, mlp_delta, mlp_inverse,
        )  # fmt: skip
        ctx.rest, ctx.link, ctx.weight_versions = rest, link, _WeightVersions(rest.groups)
        ctx.owns_gate_up = _is_checkpointed()
        return out if link is None else (read.total, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Take the gradient of the sum, or of both its terms with a link; those of a plain sum are one tensor."""
        g, link = grads[0], ctx.link
        attn_out, output_lora_mid, delta, branch_inverse, plain, inverse, qdata, scales, *others = ctx.saved_tensors
        first_lora_mid, gate_up, second_lora_mid, mlp_delta, mlp_inverse = others
        ctx.weight_versions.check()
        rest: AfterAttention = ctx.rest
        (output, first, second), (attention_branch, mlp_branch) = (
            cast(Sequence[LinearGroup], rest.groups),
            rest.branches,
        )
        d_mlp_weight = mlp_branch.weight_gradient(g, mlp_delta, mlp_inverse) if ctx.needs_input_grad[4] else None
        g_second = mlp_branch.backward(g, mlp_delta, mlp_inverse, second)[1] if link is None else link.take(grads[1])
        d_hidden, lora_operands = second.begin_backward(g_second, second_lora_mid)
        assert d_hidden is not None
        in_place = ctx.owns_gate_up and not first.quantized and first.pad_cols == 0 and d_hidden.dtype == gate_up.dtype
        hidden, d_gate_up = gated_activation_backward(
            d_hidden, gate_up,
            multiplier=first.multiplier, pad_cols=(0, first.pad_cols), gelu=rest.gelu, quantize=first.quantized,
            in_place=in_place,
        )  # fmt: skip
        second_gradients = second.parameter_gradients(g_second, Operand(*hidden), lora_operands)
        del d_hidden, hidden, g_second
        read = Operand(qdata, scales)
        d_rows, first_gradients = first.backward(Operand(*d_gate_up), read, first_lora_mid)
        assert d_rows is not None
        del d_gate_up
        gradient = StreamGradient(d_rows, rest.norm, norm_rows(rest.norm, plain, read), inverse, g)
        d_weight = gradient.of_weight(plain) if ctx.needs_input_grad[2] else None
        d_attention_weight = None
        if attention_branch.is_plain:
            d_total, g_output = gradient.of_stream_and_operand(output)
        else:
            d_total = gradient.of_stream()
            _, g_output = attention_branch.backward(d_total, delta, branch_inverse, output)
            if ctx.needs_input_grad[3]:
                d_attention_weight = attention_branch.weight_gradient(d_total, delta, branch_inverse)
        rows = output.operand(attn_out) if output.parameters() else Operand(attn_out, None)  # then nobody reads them
        d_attn_out, output_gradients = output.backward(
            g_output, rows, output_lora_mid, needs_input_grad=ctx.needs_input_grad[1]
        )
        gradients = *output_gradients, *first_gradients, *second_gradients
        return d_total, d_attn_out, d_weight, d_attention_weight, d_mlp_weight, None, None, *gradients
