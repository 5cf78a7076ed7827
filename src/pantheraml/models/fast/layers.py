"""Fused decoder layers for the supported model families.

A layer is fused by giving the instance a subclass of its own class: children, names, hooks and `isinstance` are
unchanged, and `super().forward` is the fallback whenever the fused forward does not apply (KV cache, another or a
disabled adapter, dropout). A family that is not listed is left alone, and the report says so.

A fused layer either has frozen weights with adapters, or is fully trainable.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pantheraml.base import log
from pantheraml.models import flash
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION
from pantheraml.models.derived_class import RuntimeSubclass
from pantheraml.models.fast.autograd_functions import (
    Heads,
    Norm,
    PendingResidual,
    after_attention,
    after_attention_deferred,
    attention_input,
    fused_rms_norm,
)
from pantheraml.models.fast.group_operand import LinearGroup
from pantheraml.models.fast.layer_chain import DecoderBody, LayerChain
from pantheraml.models.fast.layer_cuda_graphs import LayerGraphs
from pantheraml.models.fast.linear_groups import GroupSet, LoraGroup, base_of, why_not_fused
from pantheraml.models.fast.pass_state import PassDecisions, RopeCache, in_backward
from pantheraml.models.fast.trainable_group import TrainableGroup, is_trainable, weight_of, why_not_fused_trainable
from pantheraml.models.quantize.nf4 import NF4Linear

logger = log.get(__name__)


@dataclass(frozen=True)
class Family:
    """Differences of a family's decoder layer from Llama's."""

    plus_one: bool = False
    """Norms multiply by 1 + weight."""
    windowed: bool = False
    """Attention gets a sliding window, from the attention module or else from the config."""
    merged: bool = False
    """QKV and gate-up are one linear layer each already."""


FAMILIES = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Family(),
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": Family(windowed=True),
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": Family(windowed=True),
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": Family(windowed=True),
    "transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLDecoderLayer": Family(windowed=True),
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLDecoderLayer": Family(windowed=True),
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer": Family(),
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": Family(plus_one=True),
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer": Family(windowed=True, merged=True),
}


@dataclass
class FusionReport:
    fused: int = 0
    """Number of decoder layers that now run fused."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons why the others do not, with counts."""


def fuse(model: nn.Module) -> FusionReport:
    """Fuse every decoder layer of `model` that can be fused, in place.

    Call it when weights and adapters are on their device.
    """
    report = FusionReport()
    fused: list[Any] = []
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        reason = _why_not_layer(layer)
        if reason is None:
            fused.append(layer)
        else:
            report.reasons[reason] += 1
    for layer in fused:
        _fuse_layer(layer)
    report.fused = len(fused)
    shared = GroupSet([group for layer in fused for group in layer.fused_parts.groups])
    decisions, rope_cache = PassDecisions(), RopeCache()
    for index, layer in enumerate(fused):
        parts = layer.fused_parts
        parts.shared, parts.decisions, parts.rope_cache = shared, decisions, rope_cache
        parts.is_first = index == 0
    if fused:
        _fuse_last_norm(model, fused[0])
    for reason, count in report.reasons.items():
        logger.info("%d decoder layers are not fused: %s", count, reason)
    return report


def _family(layer: Any) -> Family | None:
    kind = type(layer)
    return FAMILIES.get(f"{kind.__module__}.{kind.__qualname__}")


def _projections(layer: Any, family: Family) -> list[list[nn.Module]]:
    """Return the layers of each linear group: QKV; output; gate-up; down."""
    attention, mlp = layer.self_attn, layer.mlp
    if family.merged:
        return [[attention.qkv_proj], [attention.o_proj], [mlp.gate_up_proj], [mlp.down_proj]]
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def _why_not_layer(layer: Any) -> str | None:
    family = _family(layer)
    if family is None:
        return f"{type(layer).__name__} is not a supported family"
    return _why_not(layer, family, _projections(layer, family))


def _fuse_layer(layer: Any) -> None:
    """Fuse a layer for which `_why_not_layer` is None."""
    kind: Any = type(layer)
    family = _family(layer)
    assert family is not None
    layer.fused_parts = _FusedParts(layer, family, _groups(_projections(layer, family)))
    layer.__class__ = _derived(_Fused, kind)


def _groups(names: list[list[nn.Module]]) -> list[LinearGroup]:
    kind = TrainableGroup if is_trainable(names[0][0]) else LoraGroup
    return [kind(group) for group in names]


def _fuse_last_norm(model: nn.Module, layer: Any) -> None:
    """Fuse the final norm, after the last of the decoder layers that `layer` belongs to."""
    body = next(m for m in model.modules() if any(child is layer for child in getattr(m, "layers", ())))
    norm: Any = body.norm
    if not isinstance(norm, _FusedNorm):
        kind: Any = type(norm)
        norm.fused_plus_one = layer.fused_parts.plus_one
        norm.__class__ = _derived(_FusedNorm, kind)


def _why_not(layer: Any, family: Family, groups: list[list[nn.Module]]) -> str | None:
    norms = [getattr(layer, name) for name in _NORMS]
    members = [member for group in groups for member in group]
    if _gelu(layer.mlp) is None:
        return "the activation of its MLP is neither SiLU nor GELU (tanh)"
    if family.merged and (layer.resid_attn_dropout.p or layer.resid_mlp_dropout.p):
        return "it has dropout on the residuals"
    if any(len({type(base_of(member)) for member in group}) > 1 for group in groups):
        return "layers with one input have different quantization formats"
    trained = {is_trainable(member) for member in members} | {norm.weight.requires_grad for norm in norms}
    if trained == {True}:
        reasons = map(why_not_fused_trainable, members)
    elif any(map(is_trainable, members)):
        return "some of its weights are trainable, and others are frozen"
    elif not any(isinstance(member, LoraLayer) for member in members):
        return "it has no adapter"
    elif True in trained:
        return "norms are trainable"
    else:
        reasons = map(why_not_fused, members)
    reason = next((reason for reason in reasons if reason is not None), None)
    return reason or _why_not_dtypes(norms[0].weight, [base_of(member) for member in members])


def _why_not_dtypes(norm: Tensor, bases: list[Any]) -> str | None:
    dtypes = {base.weight.dtype for base in bases if isinstance(base, nn.Linear)}
    if len(dtypes | {norm.dtype}) > (1 if dtypes else 2):
        return "weights and norms have different dtypes"
    if norm.is_cuda and norm.dtype != torch.bfloat16:
        return f"on GPUs the fused kernels compute in bfloat16, but the model is in {norm.dtype}"
    if not norm.is_cuda and norm.dtype != torch.float32 and any(isinstance(base, NF4Linear) for base in bases):
        return f"on CPUs fused layers with nf4 weights compute in float32, but the model is in {norm.dtype}"
    return None


def _gelu(mlp: Any) -> bool | None:
    """Return True if the MLP's activation is GELU (tanh), False if SiLU, None if neither."""
    activation = mlp.activation_fn if isinstance(getattr(mlp, "activation_fn", None), nn.Module) else mlp.act_fn
    if isinstance(activation, nn.SiLU | type(ACT2FN["silu"])):
        return False
    return True if isinstance(activation, type(ACT2FN["gelu_pytorch_tanh"])) else None


_NORMS = ("input_layernorm", "post_attention_layernorm")


class _FusedParts:
    """State of a fused layer besides its modules."""

    shared: GroupSet
    decisions: PassDecisions
    rope_cache: RopeCache
    is_first: bool
    """The model's first fused layer, which refreshes the state that all of them share."""
    graphs: LayerGraphs | None = None
    chain: LayerChain | None = None

    def __init__(self, layer: Any, family: Family, groups: list[LinearGroup]) -> None:
        self.groups = groups
        self.device: torch.device = layer.input_layernorm.weight.device
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
        self.gelu = bool(_gelu(layer.mlp))
        self.plus_one = family.plus_one
        self._epsilons = {name: _epsilon(getattr(layer, name)) for name in _NORMS}
        size = attention.head_dim
        self.heads = Heads(config.num_attention_heads, config.num_key_value_heads, size)
        self.has_head_norms = isinstance(getattr(attention, "q_norm", None), nn.Module)
        self.attention_arguments: dict[str, Any] = {}
        if family.windowed:
            window = getattr(attention, "sliding_window", getattr(config, "sliding_window", None))
            self.attention_arguments["sliding_window"] = window

    def start_pass(self, hidden_states: Tensor, arguments: dict[str, Any]) -> None:
        """Called with the first layer: bring the shared state up to date, and note whether this pass is fused."""
        adapters_written = self.graphs is not None and self.graphs.replay_speculatively(hidden_states, arguments)
        self.shared.refresh(written=adapters_written)
        embeddings = arguments.get("position_embeddings")
        if embeddings is not None and torch.is_grad_enabled():
            self.decisions.record(embeddings[0], self.shared.reason)

    def is_eager_attention(self) -> bool:
        """Return whether attention is the family's eager code, which can also return attention weights."""
        return self._config._attn_implementation not in ALL_ATTENTION_FUNCTIONS

    def norms(self, layer: Any) -> list[nn.Module]:
        """Return the layer's norms, and the per-head q and k norms, which run unfused."""
        norms = [layer._modules[name] for name in _NORMS]
        return [*norms, layer.self_attn.q_norm, layer.self_attn.k_norm] if self.has_head_norms else norms

    def norm(self, layer: Any, name: str) -> Norm:
        """Return the norm with its current weight, which may be trainable or exchanged."""
        return Norm(weight_of(layer._modules[name]), self._epsilons[name], self.plus_one)

    def changed(self) -> bool:
        """Return whether the fused forward no longer applies.

        That is: weights have another dtype, a linear layer was exchanged (as PEFT does to unload adapters), or one has
        hooks (as PEFT adds to use a different adapter per row of a batch).
        """
        return self.groups[0].dtype != self._dtype or any(
            getattr(parent, name) is not child or child._forward_pre_hooks or child._forward_hooks
            for parent, name, child in self._children
        )


def _epsilon(norm: Any) -> float:
    return float(norm.eps if isinstance(getattr(norm, "eps", None), float) else norm.variance_epsilon)


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
        run_plain = (
            args
            or kwargs.get("past_key_values") is not None
            or embeddings is None
            or embeddings[0].ndim != 3  # M-RoPE that attention itself composes from three tables
            or embeddings[0].shape[-1] != parts.heads.size
            or hidden_states.device != parts.device
            or reason is not None
            or parts.is_eager_attention()
            or parts.changed()
        )
        if run_plain:
            out: Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            return out
        if runner is not None and parts.is_first:
            chain_output = runner.begin(hidden_states, embeddings, kwargs)
            if chain_output is not None:
                return chain_output
        result = _run_layers([self], hidden_states, embeddings, kwargs)
        if runner is not None:
            runner.ran(self, hidden_states, result, kwargs)
        return result


def _run_layers(
    layers: Sequence[Any], hidden_states: Tensor, embeddings: tuple[Tensor, Tensor], kwargs: dict[str, Any]
) -> Tensor:
    """Run consecutive layers with the same arguments."""
    shape = hidden_states.shape
    pending: PendingResidual | None = None
    with torch.autocast(hidden_states.device.type, enabled=False):
        x = hidden_states.reshape(-1, shape[-1]).to(layers[0].fused_parts.groups[0].dtype)
        for layer in layers:
            parts: _FusedParts = layer.fused_parts
            attn_out, x = _attention(layer, x, pending, shape, embeddings, kwargs)
            norm, rest = parts.norm(layer, _NORMS[1]), parts.groups[1:]
            if layer is layers[-1]:
                x = after_attention(x, attn_out, norm, rest, gelu=parts.gelu)
            else:
                x, pending = after_attention_deferred(x, attn_out, norm, rest, gelu=parts.gelu)
    return x.view(shape)


def _can_rope_in_place(attention: Any, group: LinearGroup, device: torch.device, width: int) -> bool:
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
    x: Tensor,
    pending: PendingResidual | None,
    shape: torch.Size,
    embeddings: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the attention output, and x for the residual add."""
    parts: _FusedParts = layer.fused_parts
    attention = layer.self_attn
    cos, sin = parts.rope_cache.rows(embeddings, shape, new_pass=parts.is_first)
    rope, group = None if parts.has_head_norms else (cos, sin), parts.groups[0]
    in_place = _can_rope_in_place(attention, group, x.device, shape[1])
    norm = parts.norm(layer, _NORMS[0])
    q, k, v, x = attention_input(x, norm, group, rope, parts.heads, pending, in_place=in_place)
    if parts.has_head_norms:
        q, k = _apply_rope(attention.q_norm(q), cos, sin), _apply_rope(attention.k_norm(k), cos, sin)
    q, k, v = (part.unflatten(0, shape[:-1]).transpose(1, 2) for part in (q, k, v))
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


def _apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE outside of the fused Function, for heads that are normalized first."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]


class _FusedNorm(RuntimeSubclass):
    """Mixin placed before the class of the final norm, which torch would compute in a dozen passes over memory."""

    fused_plus_one: bool
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.is_cuda and {hidden_states.dtype, self.weight.dtype} != {torch.bfloat16}:
            out: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return out
        norm = Norm(self.weight, _epsilon(self), self.fused_plus_one)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return fused_rms_norm(hidden_states.flatten(0, -2), norm).view(hidden_states.shape)


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


@functools.cache
def _derived(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{kind.__name__}", (mixin, kind), {"made_by": (_derived, (mixin, kind))})
