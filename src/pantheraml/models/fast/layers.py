"""Decoder layers of known families, run as a handful of fused pieces.

A layer is fused by giving the instance a class of its own that derives from the one it had: children, names, hooks and
`isinstance` stay, and `super().forward` is the way back whenever the fused one does not apply (key/value cache, another
or a switched-off adapter, dropout). A family that is not listed stays as it is, and the report says so.

A layer has frozen weights with adapters, or everything in it is trained.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pantheraml.base import log
from pantheraml.models import flash
from pantheraml.models.attention import NAME as DOCUMENT_ATTENTION
from pantheraml.models.derived import Derived
from pantheraml.models.fast.early import EarlyStart
from pantheraml.models.fast.functions import (
    Carried,
    Heads,
    Norm,
    after_attention,
    after_attention_apart,
    attention_input,
    normalised,
)
from pantheraml.models.fast.groups import GroupSet, ProjectionGroup, base_of, why_not_fused
from pantheraml.models.fast.operand import Group
from pantheraml.models.fast.recorded import LayerGraphs
from pantheraml.models.fast.together import Body, LayersTogether
from pantheraml.models.fast.trained import TrainedGroup, is_trained, weight_of, why_not_trained
from pantheraml.models.quantise.fp8 import FP8Linear
from pantheraml.models.quantise.nf4 import NF4Linear
from pantheraml.planner.layouts import layers_with_two
from pantheraml.specs.plan import Layouts

logger = log.get(__name__)


@dataclass(frozen=True)
class Family:
    """How a family's decoder layer differs from Llama's."""

    plus_one: bool = False
    """Norms multiply by 1 + weight."""
    windowed: bool = False
    """Attention gets a sliding window, the attention module's or else the config's."""
    merged: bool = False
    """Query, key and value, and gate and up, are one layer each already."""


FAMILIES = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Family(),
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": Family(windowed=True),
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": Family(windowed=True),
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": Family(windowed=True),
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": Family(plus_one=True),
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer": Family(windowed=True, merged=True),
}


@dataclass
class FusionReport:
    fused: int = 0
    """Decoder layers that now run fused."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why others do not, and how many."""


def fuse(model: nn.Module, *, layouts: Layouts = 1) -> FusionReport:
    """Fuse every decoder layer of `model` that can be, in place. Call it when weights and adapters are on their device.
    `layouts`: of weights in e4m3, see `storage`."""
    report = FusionReport()
    fused: list[Any] = []
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        reason = _why_not_layer(layer)
        if reason is None:
            fused.append(layer)
        else:
            report.reasons[reason] += 1
    twice = _layers_with_two(fused, layers) if layouts == 2 else 0
    for number, layer in enumerate(fused):
        _fuse_layer(layer, 2 if number < twice else 1)
    report.fused = len(fused)
    shared = GroupSet([group for layer in fused for group in layer.fused_parts.groups])
    turns = _Turns()
    for index, layer in enumerate(fused):
        parts = layer.fused_parts
        parts.shared, parts.turns, parts.leads = shared, turns, index == 0
    if fused:
        _fuse_last_norm(model, fused[0])
    for reason, count in report.reasons.items():
        logger.info("%d decoder layers are not fused: %s", count, reason)
    return report


def _layers_with_two(fused: Sequence[Any], layers: Sequence[Any]) -> int:
    """How many of those that are fused, from the first, keep their MLP's weights in two layouts."""

    def size(modules: Iterable[Any]) -> int:
        packed = (m for module in modules for m in module.modules() if isinstance(m, FP8Linear))
        return sum(layer.qweight.numel() for layer in packed)

    return layers_with_two(len(fused), size(layers), size(layer.mlp for layer in fused))


def _family(layer: Any) -> Family | None:
    kind = type(layer)
    return FAMILIES.get(f"{kind.__module__}.{kind.__qualname__}")


def _projections(layer: Any, family: Family) -> list[list[nn.Module]]:
    """What each group is made of: query, key and value; output; gate and up; down."""
    attention, feed = layer.self_attn, layer.mlp
    if family.merged:
        return [[attention.qkv_proj], [attention.o_proj], [feed.gate_up_proj], [feed.down_proj]]
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [feed.gate_proj, feed.up_proj],
        [feed.down_proj],
    ]


def _why_not_layer(layer: Any) -> str | None:
    family = _family(layer)
    if family is None:
        return f"{type(layer).__name__} is not a family that the fused layers know"
    return _why_not(layer, family, _projections(layer, family))


def _fuse_layer(layer: Any, layouts: Layouts) -> None:
    """One that `_why_not_layer` has nothing against."""
    kind: Any = type(layer)
    family = _family(layer)
    assert family is not None
    layer.fused_parts = _Parts(layer, family, _groups(_projections(layer, family), layouts))
    layer.__class__ = _derived(_Fused, kind)


def _groups(names: list[list[nn.Module]], layouts: Layouts) -> list[Group]:
    if is_trained(names[0][0]):
        return [TrainedGroup(group) for group in names]
    # four fifths of the weights are the MLP's; a second layout of the others gains as little as it takes
    return [ProjectionGroup(group, own) for group, own in zip(names, (1, 1, layouts, layouts), strict=True)]


def _fuse_last_norm(model: nn.Module, layer: Any) -> None:
    """The norm after the last of the layers that `layer` is one of."""
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
        return "layers with one input are packed in different ways"
    trained = {is_trained(member) for member in members} | {norm.weight.requires_grad for norm in norms}
    if trained == {True}:
        reasons = map(why_not_trained, members)
    elif any(map(is_trained, members)):
        return "some of its weights are trained, and others are not"
    elif not any(isinstance(member, LoraLayer) for member in members):
        return "it has no adapter"
    elif True in trained:
        return "norms are trained"
    else:
        reasons = map(why_not_fused, members)
    reason = next((reason for reason in reasons if reason is not None), None)
    return reason or _why_not_dtypes(norms[0].weight, [base_of(member) for member in members])


def _why_not_dtypes(norm: Tensor, bases: list[Any]) -> str | None:
    dtypes = {base.weight.dtype for base in bases if isinstance(base, nn.Linear)}
    if len(dtypes | {norm.dtype}) > (1 if dtypes else 2):
        return "weights and norms have different dtypes"
    if norm.is_cuda and norm.dtype != torch.bfloat16:
        return f"on GPUs the fused kernels compute in bfloat16, and the model is in {norm.dtype}"
    if not norm.is_cuda and norm.dtype != torch.float32 and any(isinstance(base, NF4Linear) for base in bases):
        return f"on a CPU fused layers over nf4 compute in float32, and the model is in {norm.dtype}"
    return None


def _gelu(feed: Any) -> bool | None:
    """Whether the MLP's activation is GELU (tanh), or SiLU; None: neither."""
    activation = feed.activation_fn if isinstance(getattr(feed, "activation_fn", None), nn.Module) else feed.act_fn
    if isinstance(activation, nn.SiLU | type(ACT2FN["silu"])):
        return False
    return True if isinstance(activation, type(ACT2FN["gelu_pytorch_tanh"])) else None


_NORMS = ("input_layernorm", "post_attention_layernorm")


class _Parts:
    """What a fused layer needs besides the modules it has."""

    shared: GroupSet
    turns: _Turns
    leads: bool
    """The first of the model's fused layers: it refreshes what all of them share."""
    graphs: LayerGraphs | None = None
    together: LayersTogether | None = None

    def __init__(self, layer: Any, family: Family, groups: list[Group]) -> None:
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

    def spells_out_attention(self) -> bool:
        """Attention that is no function of its own but part of the family's code, which can also tell its weights."""
        return self._config._attn_implementation not in ALL_ATTENTION_FUNCTIONS

    def norms(self, layer: Any) -> list[nn.Module]:
        """The layer's own, and those of single heads, which run as they are."""
        found = [layer._modules[name] for name in _NORMS]
        return [*found, layer.self_attn.q_norm, layer.self_attn.k_norm] if self.has_head_norms else found

    def norm(self, layer: Any, name: str) -> Norm:
        """As it is now: its weight may be trained, or exchanged."""
        return Norm(weight_of(layer._modules[name]), self._epsilons[name], self.plus_one)

    def changed(self) -> bool:
        """Whether weights are in another dtype, a linear layer was exchanged (PEFT takes adapters out so), or somebody
        wants to hear of its calls (PEFT, to give each row of a batch an adapter of its own)."""
        return self.groups[0].dtype != self._dtype or any(
            getattr(parent, name) is not child or child._forward_pre_hooks or child._forward_hooks
            for parent, name, child in self._children
        )


class _Turns:
    """Cosine and sine of each row's position. The layers of a pass get the same ones, often for one sequence that
    stands for all; they are laid out, and kept for the backward pass, once for all layers and not once for each.
    For as long as somebody holds those, because layers that are computed again must find what their pass had, and
    others may have been begun since. Copies of a model begin without any."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def rows(self, embeddings: Sequence[Tensor], shape: torch.Size, *, anew: bool) -> tuple[Tensor, ...]:
        """[rows, size] each, for hidden states of `shape`; `anew`: a pass begins."""
        cos, sin = embeddings
        for_shape, for_sin, rows = self._known.get(cos, (None, None, ()))
        if anew or shape != for_shape or sin is not for_sin:
            # detached: a view would hold what it is a view of, and nothing would ever be dropped
            free = (e if e.requires_grad else e.detach() for e in embeddings)
            rows = tuple(e.expand(*shape[:-1], -1).reshape(-1, e.shape[-1]).contiguous() for e in free)
            self._known[cos] = shape, sin, rows
        return cast("tuple[Tensor, ...]", rows)

    def __reduce__(self) -> tuple[type[_Turns], tuple[()]]:
        return _Turns, ()


def _epsilon(norm: Any) -> float:
    return float(norm.eps if isinstance(getattr(norm, "eps", None), float) else norm.variance_epsilon)


class _Fused(Derived):
    """Mixed in before a decoder layer's own class."""

    fused_parts: _Parts

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = self.fused_parts
        in_one_go = parts.graphs or parts.together
        if parts.leads:
            ahead = parts.graphs is not None and parts.graphs.begin_ahead(hidden_states, kwargs)
            parts.shared.refresh(written=ahead)
        elif in_one_go is not None and in_one_go.hands_on(self, hidden_states):
            return hidden_states
        embeddings: Any = kwargs.get("position_embeddings")
        plain = (
            args
            or kwargs.get("past_key_values") is not None
            or embeddings is None
            or embeddings[0].shape[-1] != parts.heads.size
            or hidden_states.device != parts.device
            or parts.shared.reason is not None
            or parts.spells_out_attention()
            or parts.changed()
        )
        if plain:
            out: Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            return out
        if in_one_go is not None and parts.leads:
            of_all = in_one_go.begin(hidden_states, embeddings, kwargs)
            if of_all is not None:
                return of_all
        result = _run_layers([self], hidden_states, embeddings, kwargs)
        if in_one_go is not None:
            in_one_go.ran(self, hidden_states, result, kwargs)
        return result


def _run_layers(
    layers: Sequence[Any], hidden_states: Tensor, embeddings: tuple[Tensor, Tensor], kwargs: dict[str, Any]
) -> Tensor:
    """Layers that follow each other, and are given the same arguments."""
    shape = hidden_states.shape
    carried: Carried | None = None
    with torch.autocast(hidden_states.device.type, enabled=False):
        x = hidden_states.reshape(-1, shape[-1]).to(layers[0].fused_parts.groups[0].dtype)
        for layer in layers:
            parts: _Parts = layer.fused_parts
            mixed, x = _attention(layer, x, carried, shape, embeddings, kwargs)
            norm, others = parts.norm(layer, _NORMS[1]), parts.groups[1:]
            if layer is layers[-1]:
                x = after_attention(x, mixed, norm, others, gelu=parts.gelu)
            else:
                x, carried = after_attention_apart(x, mixed, norm, others, gelu=parts.gelu)
    return x.view(shape)


def _turn_in_place(attention: Any, group: Group, device: torch.device, width: int) -> bool:
    """Whether query and key may turn in the output of their product: FlashAttention 4 takes views of it, and nobody
    else sees it. Selective checkpointing keeps it, for instance, and would have it turned twice."""
    return (
        attention.config._attn_implementation == DOCUMENT_ATTENTION
        and not attention.attention_dropout
        and flash.is_likely(device, group.dtype, attention.head_dim, width)
        and not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
    )


def _attention(
    layer: Any,
    x: Tensor,
    carried: Carried | None,
    shape: torch.Size,
    embeddings: tuple[Tensor, Tensor],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """What attention mixes of the rows x, and x for the residual sum."""
    parts: _Parts = layer.fused_parts
    attention = layer.self_attn
    cos, sin = parts.turns.rows(embeddings, shape, anew=parts.leads)
    turns, group = None if parts.has_head_norms else (cos, sin), parts.groups[0]
    in_place = _turn_in_place(attention, group, x.device, shape[1])
    norm = parts.norm(layer, _NORMS[0])
    q, k, v, x = attention_input(x, norm, group, turns, parts.heads, carried, in_place=in_place)
    if parts.has_head_norms:
        q, k = _turned(attention.q_norm(q), cos, sin), _turned(attention.k_norm(k), cos, sin)
    q, k, v = (part.unflatten(0, shape[:-1]).transpose(1, 2) for part in (q, k, v))
    arguments = {name: value for name, value in kwargs.items() if name not in _NOT_FOR_ATTENTION}
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    mixed, _ = attend(
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
    return mixed.reshape(x.shape[0], -1), x


_NOT_FOR_ATTENTION = {"attention_mask", "position_embeddings", "past_key_values"}


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding outside of the fused product, for heads that are normalised first."""
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]


class _FusedNorm(Derived):
    """Mixed in before the class of the last norm, which torch would compute in a dozen passes over the rows."""

    fused_plus_one: bool
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.is_cuda and {hidden_states.dtype, self.weight.dtype} != {torch.bfloat16}:
            out: Tensor = super().forward(hidden_states)  # type: ignore[misc]
            return out
        norm = Norm(self.weight, _epsilon(self), self.fused_plus_one)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return normalised(hidden_states.flatten(0, -2), norm).view(hidden_states.shape)


def run_together(model: nn.Module) -> None:
    """For our own loop, which calls the model and nothing in it: from now on all fused layers run in one go where
    possible (`together`)."""
    found = _all_fused(model)
    if found is not None:
        layers, body = found
        together = LayersTogether(layers, body, _run_layers)
        for layer in layers:
            layer.fused_parts.together = together


def record_passes(model: nn.Module) -> EarlyStart | None:
    """From now on passes through the model's fused layers are recorded as CUDA graphs where possible (`recorded`). How
    to begin one before the model is called, if that can be."""
    found = _all_fused(model)
    if found is None:
        return None
    layers, body = found
    graphs = LayerGraphs(layers, body, layers[0].fused_parts.shared, _run_layers)
    for layer in layers:
        layer.fused_parts.graphs = graphs
    return EarlyStart.of(body.module(), graphs)


def _all_fused(model: nn.Module) -> tuple[list[Any], Body] | None:
    """All decoder layers and what calls them; None: not all are fused, or their loop is not a known one."""
    layers: list[Any] = [layer for layer in model.modules() if is_fused(layer)]
    if not layers or len(layers) < sum(isinstance(layer, GradientCheckpointingLayer) for layer in model.modules()):
        return None
    body = Body.of(model, layers)
    return None if body is None else (layers, body)


def release_recordings(model: nn.Module) -> None:
    """Give back the memory of recorded passes; they are recorded anew when they come again."""
    for graphs in {layer.fused_parts.graphs for layer in model.modules() if isinstance(layer, _Fused)}:
        if graphs is not None:
            graphs.release()


def is_fused(layer: nn.Module) -> bool:
    return isinstance(layer, _Fused)


@functools.cache
def _derived(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Fused{kind.__name__}", (mixin, kind), {"made_by": (_derived, (mixin, kind))})
