"""Model families whose decoder layers can be fused: how they differ from Llama's, and why a layer cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pantheraml.models.fast.linear_groups import base_of, why_not_fused
from pantheraml.models.fast.trainable_group import is_trainable, why_not_fused_trainable
from pantheraml.models.quantize.nf4 import NF4Linear

INPUT_NORM = "input_layernorm"


@dataclass(frozen=True)
class Family:
    """Differences of a family's decoder layer from Llama's."""

    plus_one: bool = False
    """Norms multiply by 1 + weight."""
    windowed: bool = False
    """Attention gets a sliding window, from the attention module or else from the config."""
    merged: bool = False
    """QKV and gate-up are one linear layer each already."""
    mlp_norm: str = "post_attention_layernorm"
    """Norm of the MLP's input."""
    output_norms: tuple[str, ...] = ()
    """Norms of what attention and the MLP add to the residual stream."""
    multiplier: str | None = None
    """Attribute of the layer: factor of what attention and the MLP add to the residual stream."""
    rope_switch: str | None = None
    """Attribute of the attention: whether this layer uses RoPE."""

    @property
    def norms(self) -> tuple[str, ...]:
        return INPUT_NORM, self.mlp_norm, *self.output_norms

    def uses_rope(self, attention: Any) -> bool:
        return self.rope_switch is None or bool(getattr(attention, self.rope_switch))

    def multiplier_of(self, layer: Any) -> float:
        return 1.0 if self.multiplier is None else float(getattr(layer, self.multiplier))


FAMILIES = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Family(),
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": Family(windowed=True),
    "transformers.models.ministral.modeling_ministral.MinistralDecoderLayer": Family(windowed=True),
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": Family(windowed=True),
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": Family(windowed=True),
    "transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLDecoderLayer": Family(windowed=True),
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLDecoderLayer": Family(windowed=True),
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer": Family(),
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": Family(plus_one=True),
    "transformers.models.gemma3.modeling_gemma3.Gemma3DecoderLayer": Family(
        plus_one=True,
        windowed=True,
        mlp_norm="pre_feedforward_layernorm",
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "transformers.models.phi3.modeling_phi3.Phi3DecoderLayer": Family(windowed=True, merged=True),
    "transformers.models.granite.modeling_granite.GraniteDecoderLayer": Family(multiplier="residual_multiplier"),
    "transformers.models.smollm3.modeling_smollm3.SmolLM3DecoderLayer": Family(windowed=True, rope_switch="use_rope"),
}


def family_of(layer: Any) -> Family | None:
    kind = type(layer)
    return FAMILIES.get(f"{kind.__module__}.{kind.__qualname__}")


def projections(layer: Any, family: Family) -> list[list[nn.Module]]:
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


def window_of(attention: Any) -> int | None:
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def kind_of(layer: Any) -> object:
    """Return what distinguishes the layer from others that are fused in another way."""
    family, attention = family_of(layer), layer.self_attn
    assert family is not None
    window = window_of(attention) if family.windowed else None
    return type(layer), window, family.uses_rope(attention), family.multiplier_of(layer)


def head_norms(attention: Any) -> list[Any]:
    """Return the modules that normalize query and key heads before RoPE; empty if there are none."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return norms if all(isinstance(norm, nn.Module) for norm in norms) else []


def epsilon_of(norm: Any) -> float:
    return float(norm.eps if isinstance(getattr(norm, "eps", None), float) else norm.variance_epsilon)


def uses_gelu(mlp: Any) -> bool | None:
    """Return True if the MLP's activation is GELU (tanh), False if SiLU, None if neither."""
    activation = mlp.activation_fn if isinstance(getattr(mlp, "activation_fn", None), nn.Module) else mlp.act_fn
    if isinstance(activation, nn.SiLU | type(ACT2FN["silu"])):
        return False
    return True if isinstance(activation, type(ACT2FN["gelu_pytorch_tanh"])) else None


def why_not_layer(layer: Any) -> str | None:
    """Return why this layer cannot be fused, or None if it can."""
    family = family_of(layer)
    if family is None:
        return f"{type(layer).__name__} is not a supported family"
    groups = projections(layer, family)
    if uses_gelu(layer.mlp) is None:
        return "the activation of its MLP is neither SiLU nor GELU (tanh)"
    if family.merged and (layer.resid_attn_dropout.p or layer.resid_mlp_dropout.p):
        return "it has dropout on the residuals"
    if any(len({type(base_of(member)) for member in group}) > 1 for group in groups):
        return "layers with one input have different quantization formats"
    return _why_not_head_norms(layer.self_attn) or _why_not_weights(layer, family, groups)


def _why_not_head_norms(attention: Any) -> str | None:
    norms = head_norms(attention)
    if any(norm.weight.shape != (attention.head_dim,) for norm in norms):
        return "the norms of its queries and keys are not per head"
    if len(set(map(epsilon_of, norms))) > 1:
        return "the norms of its queries and keys have different epsilons"
    return None


def _why_not_weights(layer: Any, family: Family, groups: list[list[nn.Module]]) -> str | None:
    norms = [getattr(layer, name) for name in family.norms]
    members = [member for group in groups for member in group]
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
