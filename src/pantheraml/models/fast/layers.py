"""Fused decoder layers for the supported model families.

A layer is fused by giving the instance a subclass of its own class: children, names, hooks and `isinstance` are
unchanged, and `super().forward` is the fallback whenever the fused forward does not apply (KV cache, another or a
disabled adapter, dropout). A family that is not listed is left alone, and the report says so.

A fused layer either has frozen weights with adapters, or is fully trainable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pantheraml.base import log
from pantheraml.kernels.head_norm_rope import HeadNorms
from pantheraml.models import flash
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.fast.autograd_functions import (
    QKV,
    AfterAttention,
    Heads,
    PendingResidual,
    after_attention_deferred,
    attention_input,
)
from pantheraml.models.fast.families import (
    Family,
    epsilon_of,
    family_of,
    head_norms,
    kind_of,
    norms_each_head,
    projections,
    query_scale,
    uses_gelu,
    why_not_layer,
)
from pantheraml.models.fast.frozen_group import FrozenGroup
from pantheraml.models.fast.group_operand import ForwardGroup, LinearGroup
from pantheraml.models.fast.group_set import GroupSet
from pantheraml.models.fast.kept_inputs import KeptInputs
from pantheraml.models.fast.layer_chain import DecoderBody, LayerChain
from pantheraml.models.fast.layer_cuda_graphs import LayerGraphs
from pantheraml.models.fast.linear_groups import LoraGroup
from pantheraml.models.fast.norms import derived, fuse_norm, fuse_norms
from pantheraml.models.fast.part_norms import PartNorms
from pantheraml.models.fast.pass_state import PassDecisions, RopeCache, in_backward
from pantheraml.models.fast.residual_branch import Branch, Norm
from pantheraml.models.fast.self_check import why_not_equal
from pantheraml.models.fast.tiled_mlp import after_attention
from pantheraml.models.fast.trainable_group import TrainableGroup, is_trainable, weight_of

logger = log.get(__name__)


@dataclass
class FusionReport:
    fused: int = 0
    """Number of decoder layers that now run fused."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons why the others do not, with counts."""
    norms: int = 0
    """Number of norms that run as one kernel in the others, and after them."""


def fuse(model: nn.Module, *, compare: bool = True) -> FusionReport:
    """Fuse every decoder layer of `model` that can be fused, in place.

    Call it when weights and adapters are on their device. `compare`: check that a fused layer of each kind computes
    what its class does, see `self_check`.
    """
    report = FusionReport()
    fused: list[Any] = []
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    differences: dict[object, str | None] = {}
    for layer in layers:
        reason = why_not_layer(layer)
        if reason is None and compare:
            kind = kind_of(layer)
            if kind not in differences:
                differences[kind] = why_not_equal(layer, _fuse_alone)
            reason = differences[kind]
        if reason is None:
            fused.append(layer)
        else:
            report.reasons[reason] += 1
    for layer in fused:
        _fuse_layer(layer)
    _share_state(fused)
    report.fused = len(fused)
    if fused:
        _fuse_last_norm(model, fused[0])
    if report.reasons:
        report.norms = _fuse_norms_of_others(model, layers)
    for reason, count in report.reasons.items():
        logger.info("%d decoder layers are not fused: %s", count, reason)
    if report.norms:
        logger.info("%d norms of layers that are not fused run as one kernel each", report.norms)
    return report


def _fuse_norms_of_others(model: nn.Module, layers: Sequence[nn.Module]) -> int:
    """Fuse the norms in layers that are not fused, and beside them: the last one."""
    inside = [module for layer in layers if not is_fused(layer) for module in layer.modules()]
    bodies = [m for m in model.modules() if any(child in layers for child in getattr(m, "layers", ()))]
    return fuse_norms([*inside, *(child for body in bodies for child in body.children())])


def _fuse_alone(layer: Any) -> None:
    _fuse_layer(layer)
    _share_state([layer])


def _share_state(fused: Sequence[Any]) -> None:
    """Give layers of one model the state that they share."""
    shared = GroupSet([group for layer in fused for group in layer.fused_parts.groups])
    decisions, rope_cache = PassDecisions(), RopeCache()
    windows = set()
    for index, layer in enumerate(fused):
        parts = layer.fused_parts
        parts.shared, parts.decisions, parts.rope_cache = shared, decisions, rope_cache
        parts.is_first = index == 0
        window = parts.attention_arguments.get("sliding_window")
        parts.may_start_table = window not in windows
        windows.add(window)


def _fuse_layer(layer: Any) -> None:
    """Fuse a layer for which `why_not_layer` is None."""
    kind: Any = type(layer)
    family = family_of(layer)
    assert family is not None
    layer.fused_parts = _FusedParts(layer, family, _groups(projections(layer, family)))
    layer.__class__ = derived(_Fused, kind)


def _groups(names: list[list[nn.Module]]) -> list[LinearGroup]:
    kind = TrainableGroup if is_trainable(names[0][0]) else LoraGroup
    return [kind(group) for group in names]


def _fuse_last_norm(model: nn.Module, layer: Any) -> None:
    """Fuse the final norm, after the last of the decoder layers that `layer` belongs to."""
    body = next(m for m in model.modules() if any(child is layer for child in getattr(m, "layers", ())))
    fuse_norm(body.norm, plus_one=layer.fused_parts.plus_one)


class _FusedParts:
    """State of a fused layer besides its modules."""

    shared: GroupSet
    decisions: PassDecisions
    rope_cache: RopeCache
    is_first: bool
    """The model's first fused layer, which refreshes the state that all of them share."""
    may_start_table: bool
    """The first layer of its window: Gemma 3's layers with and without a window have a RoPE table each."""
    reads_positions: bool
    """Attention depends on the positions, besides its RoPE table."""
    graphs: LayerGraphs | None = None
    chain: LayerChain | None = None
    ran = False
    """Whether this layer has run fused."""
    failed = False
    """Whether it is left unfused because fused layers failed at their first use."""

    def __init__(self, layer: Any, family: Family, groups: list[LinearGroup]) -> None:
        self.groups = groups
        self.frozen_groups = [FrozenGroup(group) for group in groups if isinstance(group, LoraGroup)]
        """The groups for passes with disabled adapters; empty if the layer is trainable."""
        self.device: torch.device = getattr(layer, family.norms[0]).weight.device
        self._dtype = groups[0].dtype
        attention = layer.self_attn
        self._config = config = attention.config
        own = {id(member) for group in groups for member in group.layers}
        self._children = [
            (parent, name, child)
            for parent in (attention, layer.mlp)
            for name, child in parent.named_children()
            if id(child) in own
        ]
        self._hooks = _hooks_inside(layer, family)
        self.gelu = bool(uses_gelu(layer.mlp))
        self.plus_one, self._family = family.plus_one, family
        self._epsilons = {name: epsilon_of(getattr(layer, name)) for name in family.norms}
        size = attention.head_dim
        self.heads = Heads(config.num_attention_heads, config.num_key_value_heads, size)
        self._head_epsilon = next(map(epsilon_of, head_norms(attention)), None)
        self._norms_each_head = norms_each_head(attention)
        self._kept_inputs = KeptInputs()
        self.reads_positions = family.scales_queries
        self.uses_rope, self._multiplier = family.uses_rope(attention), family.multiplier_of(layer)
        self.attention_arguments: dict[str, Any] = {}
        if family.windowed:
            self.attention_arguments["sliding_window"] = family.window_of(attention)

    def start_pass(self, hidden_states: Tensor, arguments: dict[str, Any]) -> None:
        """Called with the first layer: bring the shared state up to date."""
        adapters_written = self.graphs is not None and self.graphs.replay_speculatively(hidden_states, arguments)
        self.shared.refresh(written=adapters_written)

    def is_eager_attention(self) -> bool:
        """Return whether attention is the family's eager code, which can also return attention weights."""
        return self._config._attn_implementation not in ALL_ATTENTION_FUNCTIONS

    def norms(self, layer: Any) -> list[nn.Module]:
        """Return all norms of the layer."""
        return [*(layer._modules[name] for name in self._family.norms), *head_norms(layer.self_attn)]

    def norm(self, layer: Any, name: str | None) -> Norm | None:
        """Return the norm with its current weight, which may be trainable or exchanged."""
        return None if name is None else self._norm(layer, name)

    def input_norm(self, layer: Any) -> Norm | None:
        return self.norm(layer, self._family.input_norm)

    def _norm(self, layer: Any, name: str) -> Norm:
        return Norm(weight_of(layer._modules[name]), self._epsilons[name], self.plus_one)

    def qkv(self, attention: Any, group: ForwardGroup, *, in_place: bool) -> QKV:
        if self._head_epsilon is None:
            return QKV(group, self.heads, in_place=in_place)
        query, key = (weight_of(attention._modules[name]) for name in ("q_norm", "k_norm"))
        if not (self._norms_each_head and self.uses_rope):
            queries, keys, size = self.heads
            columns = queries * size, keys * size
            parts = PartNorms(query, key, self._head_epsilon, self.plus_one, columns)
            return QKV(group, self.heads, parts, in_place=in_place)
        norms = HeadNorms(query, key, self._head_epsilon, self.plus_one)
        return QKV(group, self.heads, norms, self._kept_inputs.of(norms), in_place)

    def after_attention(self, layer: Any, groups: Sequence[ForwardGroup]) -> AfterAttention:
        names = self._family.output_norms
        norms = [self._norm(layer, name) for name in names] if names else [None, None]
        attention, mlp = (Branch(norm, self._multiplier) for norm in norms)
        return AfterAttention(self.norm(layer, self._family.mlp_norm), groups, self.gelu, (attention, mlp))

    def why_changed(self) -> str | None:
        """Return why the fused forward no longer applies, or None.

        PEFT exchanges linear layers to unload adapters, and adds hooks to use a different adapter per row of a batch;
        scripts add hooks that look at activations.
        """
        if self.groups[0].dtype != self._dtype:
            return f"weights were cast to {self.groups[0].dtype}"
        if any(self._hooks):
            return "a module inside them has hooks, which fused layers do not call"
        if any(getattr(parent, name) is not child for parent, name, child in self._children):
            return "a linear layer was exchanged"
        return None


def _hooks_inside(layer: Any, family: Family) -> list[dict[int, Any]]:
    """Return the hooks of all modules in the layer, which a fused forward would not call."""
    norms = [getattr(layer, name) for name in family.norms]
    modules = [*layer.self_attn.modules(), *layer.mlp.modules(), *norms]
    return [
        hooks
        for each in modules
        for hooks in (each._forward_pre_hooks, each._forward_hooks, each._backward_pre_hooks, each._backward_hooks)
    ]


class _Fused(RuntimeSubclass):
    """Mixin placed before a decoder layer's own class."""

    fused_parts: _FusedParts

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = self.fused_parts
        recomputed = in_backward()
        runner = None if recomputed else parts.graphs or parts.chain
        embeddings: Any = kwargs.get("position_embeddings")
        if parts.is_first and not recomputed:
            parts.start_pass(hidden_states, kwargs)
        elif runner is not None and runner.is_passthrough(self, hidden_states):
            return hidden_states
        reason = parts.shared.reason
        if recomputed and embeddings is not None:
            reason = parts.decisions.of(embeddings[0], reason)
        elif parts.may_start_table and embeddings is not None and torch.is_grad_enabled():
            parts.decisions.record(embeddings[0], reason)
        frozen = parts.shared.disabled and not recomputed and not torch.is_grad_enabled()
        if parts.shared.failed and not recomputed:
            parts.failed = True
        run_plain = (
            args
            or parts.failed
            or kwargs.get("past_key_values") is not None
            or embeddings is None
            or embeddings[0].ndim != 3  # M-RoPE that attention itself composes from three tables
            or embeddings[0].shape[-1] != parts.heads.size
            or hidden_states.device != parts.device
            or (reason is not None and not frozen)
            or (parts.reads_positions and kwargs.get("position_ids") is None)
            or parts.is_eager_attention()
        )
        changed = None if run_plain else parts.why_changed()
        if run_plain or changed is not None:
            if torch.is_grad_enabled() and not recomputed:
                parts.shared.tell_unfused(changed or reason)
            return self.forward_unfused(hidden_states, *args, **kwargs)
        run = _run_layers if parts.ran or recomputed else _run_first_time
        if frozen:
            return run([self], hidden_states, embeddings, kwargs, frozen=True)
        if runner is not None and parts.is_first:
            chain_output = runner.begin(hidden_states, embeddings, kwargs)
            if chain_output is not None:
                return chain_output
        result = run([self], hidden_states, embeddings, kwargs)
        if runner is not None and not parts.failed:
            runner.ran(self, hidden_states, result, kwargs)
        return result

    def forward_unfused(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        return out


def _run_first_time(
    layers: Sequence[Any],
    hidden_states: Tensor,
    embeddings: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
    *,
    frozen: bool = False,
) -> Tensor:
    """Run one layer fused; if that fails (a kernel does not compile on this GPU), run it unfused, and all from then on.

    An error that the unfused layer raises as well is not one of fusing. Recomputed layers of this pass run as in their
    own forward: those before this one have run fused.
    """
    (layer,) = layers
    parts: _FusedParts = layer.fused_parts
    try:
        result = _run_layers(layers, hidden_states, embeddings, kwargs, frozen=frozen)
    except torch.OutOfMemoryError:
        raise
    except Exception as err:  # noqa: BLE001 - a compiler may raise anything; the reason is logged
        out: Tensor = layer.forward_unfused(hidden_states, **kwargs)
        reason = next(iter(str(err).splitlines()), "")
        logger.warning("decoder layers run unfused: the first fused pass failed (%s: %s)", type(err).__name__, reason)
        parts.failed = parts.shared.failed = True
        return out
    parts.ran = True
    return result


def _run_layers(
    layers: Sequence[Any],
    hidden_states: Tensor,
    embeddings: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
    *,
    frozen: bool = False,
) -> Tensor:
    """Run consecutive layers with the same arguments. `frozen`: one layer, without its adapters."""
    shape = hidden_states.shape
    pending: PendingResidual | None = None
    with torch.autocast(hidden_states.device.type, enabled=False):
        x = hidden_states.reshape(-1, shape[-1]).to(layers[0].fused_parts.groups[0].dtype)
        for layer in layers:
            parts: _FusedParts = layer.fused_parts
            groups: Sequence[ForwardGroup] = parts.frozen_groups if frozen else parts.groups
            attn_out, x = _attention(layer, groups[0], x, pending, shape, embeddings, kwargs)
            rest = parts.after_attention(layer, groups[1:])
            if layer is layers[-1]:
                x = after_attention(x, attn_out, rest)
            else:
                x, pending = after_attention_deferred(x, attn_out, rest)
    return x.view(shape)


def _can_rope_in_place(attention: Any, group: ForwardGroup, device: torch.device, width: int) -> bool:
    """Return whether RoPE may be applied in place, in the output of the QKV matmul.

    FlashAttention 4 takes views of it, and nothing else may see it: selective checkpointing, for example, stores it and
    would have RoPE applied twice.
    """
    return (
        attention.config._attn_implementation == DOCUMENT_ATTENTION
        and not attention.attention_dropout
        and flash.likely_supported(device, group.dtype, attention.head_dim, width)
        and not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
    )


def _attention(
    layer: Any,
    group: ForwardGroup,
    x: Tensor,
    pending: PendingResidual | None,
    shape: torch.Size,
    embeddings: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the attention output, and x for the residual add."""
    parts: _FusedParts = layer.fused_parts
    attention = layer.self_attn
    rope = None
    if parts.uses_rope:
        cos, sin = parts.rope_cache.rows(embeddings, shape, new_pass=parts.may_start_table)
        rope = cos, sin
    qkv = parts.qkv(attention, group, in_place=_can_rope_in_place(attention, group, x.device, shape[1]))
    q, k, v, x = attention_input(x, parts.input_norm(layer), qkv, rope, pending)
    q, k, v = (part.unflatten(0, shape[:-1]).transpose(1, 2) for part in (q, k, v))
    if parts.reads_positions:
        q = q * query_scale(attention, kwargs["position_ids"], q.dtype)
    arguments = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_ATTENTION}
    attention_fn = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    attn_out, _ = attention_fn(
        attention,
        q,
        k,
        v,
        kwargs.get("attention_mask"),
        dropout=attention.attention_dropout if attention.training else 0.0,
        scaling=attention.scaling,
        **parts.attention_arguments,
        **arguments,
    )
    return attn_out.reshape(x.shape[0], -1), x


_NOT_FOR_ATTENTION = {"attention_mask", "position_embeddings", "past_key_values"}


def enable_layer_chain(model: nn.Module) -> None:
    """Run all fused layers as one chain where possible (`layer_chain`).

    For our own loop, which calls the model and none of its parts.
    """
    chainable = _all_fused(model)
    if chainable is not None:
        layers, body = chainable
        chain = LayerChain(layers, body, _run_layers)
        for layer in layers:
            layer.fused_parts.chain = chain


def enable_layer_graphs(model: nn.Module) -> None:
    """Capture passes through the fused layers as CUDA graphs where possible (`layer_cuda_graphs`)."""
    chainable = _all_fused(model)
    if chainable is not None:
        layers, body = chainable
        graphs = LayerGraphs(layers, body, layers[0].fused_parts.shared, _run_layers)
        for layer in layers:
            layer.fused_parts.graphs = graphs


def _all_fused(model: nn.Module) -> tuple[list[Any], DecoderBody] | None:
    """Return all decoder layers and their body; None if some are not fused or the loop over them is unknown."""
    layers: list[Any] = [layer for layer in model.modules() if is_fused(layer)]
    if not layers or len(layers) < sum(isinstance(layer, GradientCheckpointingLayer) for layer in model.modules()):
        return None
    body = DecoderBody.of(model, layers)
    return None if body is None else (layers, body)


def release_layer_graphs(model: nn.Module) -> None:
    """Free the memory of captured passes; they are captured again when needed."""
    for graphs in {layer.fused_parts.graphs for layer in model.modules() if isinstance(layer, _Fused)}:
        if graphs is not None:
            graphs.release()


def is_fused(layer: nn.Module) -> bool:
    return isinstance(layer, _Fused)
