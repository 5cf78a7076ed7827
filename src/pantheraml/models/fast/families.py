"""Model families whose decoder layers can be fused: how they differ from Llama's, and why a layer cannot be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.activations import ACT2FN

from pantheraml.models.fast.linear_groups import base_of, why_not_fused
from pantheraml.models.fast.trainable_group import is_trainable, why_not_fused_trainable
from pantheraml.models.quantize.nf4 import NF4Linear


@dataclass(frozen=True)
class Family:
    """Differences of a family's decoder layer from Llama's."""

    plus_one: bool = False
    """Norms multiply by 1 + weight."""
    windowed: bool = False
    """Attention gets a sliding window, from the attention module or else from the config."""
    merged: bool = False
    """QKV and gate-up are one linear layer each already."""
    input_norm: str | None = "input_layernorm"
    """Norm of the attention's input; None: there is none."""
    mlp_norm: str | None = "post_attention_layernorm"
    """Norm of the MLP's input."""
    output_norms: tuple[str, ...] = ()
    """Norms of what attention and the MLP add to the residual stream."""
    multiplier: str | None = None
    """Attribute of the layer: factor of what attention and the MLP add to the residual stream."""
    window_switch: str | None = None
    """Attribute of the attention: whether this layer uses the window. If the model has one, others have no RoPE."""
    rope_switch: str | None = None
    """Attribute of the attention: whether this layer uses RoPE."""
    scales_queries: bool = False
    """Queries are multiplied by a function of their position, see `query_scale`."""

    @property
    def norms(self) -> tuple[str, ...]:
        names = self.input_norm, self.mlp_norm, *self.output_norms
        return tuple(name for name in names if name is not None)

    def window_of(self, attention: Any) -> int | None:
        if not self.windowed or (self.window_switch is not None and not getattr(attention, self.window_switch)):
            return None
        return _window_of(attention)

    def uses_rope(self, attention: Any) -> bool:
        if self.window_switch is not None:
            return bool(_window_of(attention) is None or getattr(attention, self.window_switch))
        return self.rope_switch is None or bool(getattr(attention, self.rope_switch))

    def multiplier_of(self, layer: Any) -> float:
        return 1.0 if self.multiplier is None else float(getattr(layer, self.multiplier))


_POST_NORMS = Family(
    input_norm=None, mlp_norm=None, output_norms=("post_attention_layernorm", "post_feedforward_layernorm")
)

FAMILIES = {
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": Family(),
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": Family(windowed=True),
    "transformers.models.ministral.modeling_ministral.MinistralDecoderLayer": Family(windowed=True),
    "transformers.models.ministral3.modeling_ministral3.Ministral3DecoderLayer": Family(
        windowed=True, scales_queries=True
    ),
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
    "transformers.models.cwm.modeling_cwm.CwmDecoderLayer": Family(windowed=True),
    "transformers.models.olmo2.modeling_olmo2.Olmo2DecoderLayer": _POST_NORMS,
    "transformers.models.olmo3.modeling_olmo3.Olmo3DecoderLayer": replace(_POST_NORMS, windowed=True),
    "transformers.models.exaone4.modeling_exaone4.Exaone4DecoderLayer": replace(
        _POST_NORMS, windowed=True, window_switch="is_sliding"
    ),
}


_EXPERTS = "its MLP is a mixture of experts"
_PARALLEL = "attention and MLP read the same LayerNorm side by side"
_NEIGHBORS = "RoPE turns neighboring columns, and not halves of a head"
_TWO_MATRICES = "its MLP has no gate"
_LATENT = "its attention is of low rank (MLA)"

UNFUSED = {
    "transformers.models.gemma2.modeling_gemma2.Gemma2DecoderLayer": "its attention caps its scores",
    "transformers.models.gemma4.modeling_gemma4.Gemma4TextDecoderLayer": (
        "it normalizes values, scales its output, and may share keys and values with other layers"
    ),
    "transformers.models.gemma4_unified.modeling_gemma4_unified.Gemma4UnifiedTextDecoderLayer": (
        "it normalizes values, and scales its output"
    ),
    "transformers.models.llama4.modeling_llama4.Llama4TextDecoderLayer": _NEIGHBORS,
    "transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer": (
        "its attention is linear, or has an output gate and RoPE on a part of each head"
    ),
    "transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextDecoderLayer": (
        "its attention is linear or has an output gate, and its MLP is a mixture of experts"
    ),
    "transformers.models.cohere.modeling_cohere.CohereDecoderLayer": _PARALLEL,
    "transformers.models.cohere2.modeling_cohere2.Cohere2DecoderLayer": _PARALLEL,
    "transformers.models.glm.modeling_glm.GlmDecoderLayer": _NEIGHBORS,
    "transformers.models.glm4.modeling_glm4.Glm4DecoderLayer": _NEIGHBORS,
    "transformers.models.ernie4_5.modeling_ernie4_5.Ernie4_5DecoderLayer": _NEIGHBORS,
    "transformers.models.helium.modeling_helium.HeliumDecoderLayer": _NEIGHBORS,
    "transformers.models.seed_oss.modeling_seed_oss.SeedOssDecoderLayer": "it has dropout on the residuals",
    "transformers.models.granite_swa.modeling_granite_swa.GraniteSWADecoderLayer": "its attention has sinks",
    "transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense.HunYuanDenseV1DecoderLayer": (
        "it normalizes queries and keys after RoPE"
    ),
    "transformers.models.olmo.modeling_olmo.OlmoDecoderLayer": "it has LayerNorms without weights",
    "transformers.models.arcee.modeling_arcee.ArceeDecoderLayer": _TWO_MATRICES,
    "transformers.models.nemotron.modeling_nemotron.NemotronDecoderLayer": _TWO_MATRICES,
    "transformers.models.starcoder2.modeling_starcoder2.Starcoder2DecoderLayer": _TWO_MATRICES,
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssDecoderLayer": f"{_EXPERTS}, and its attention has sinks",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeDecoderLayer": _EXPERTS,
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer": _EXPERTS,
    "transformers.models.mixtral.modeling_mixtral.MixtralDecoderLayer": _EXPERTS,
    "transformers.models.olmoe.modeling_olmoe.OlmoeDecoderLayer": _EXPERTS,
    "transformers.models.phimoe.modeling_phimoe.PhimoeDecoderLayer": _EXPERTS,
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2DecoderLayer": _LATENT,
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3DecoderLayer": _LATENT,
    "transformers.models.minicpm3.modeling_minicpm3.MiniCPM3DecoderLayer": _LATENT,
    "transformers.models.falcon_h1.modeling_falcon_h1.FalconH1DecoderLayer": "it has a state-space part",
    "transformers.models.lfm2.modeling_lfm2.Lfm2DecoderLayer": "some of its layers are convolutions",
}
"""Why layers of known families are not fused. Those of families in neither table are of a kind unknown here."""


def family_of(layer: Any) -> Family | None:
    return FAMILIES.get(_class_name(layer))


def _class_name(layer: Any) -> str:
    kind = type(layer)
    return f"{kind.__module__}.{kind.__qualname__}"


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


def _window_of(attention: Any) -> int | None:
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window


def query_scale(attention: Any, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Ministral 3's scale of queries [B, 1, S, 1]: it grows with each multiple of the original context."""
    rope = attention.config.rope_parameters
    multiples = torch.floor(positions / rope["original_max_position_embeddings"])
    scale = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + multiples)
    return scale[:, None, :, None].to(dtype)


def kind_of(layer: Any) -> object:
    """Return what distinguishes the layer from others that are fused in another way."""
    family, attention = family_of(layer), layer.self_attn
    assert family is not None
    return type(layer), family.window_of(attention), family.uses_rope(attention), family.multiplier_of(layer)


def head_norms(attention: Any) -> list[Any]:
    """Return the modules that normalize queries and keys before RoPE; empty if there are none."""
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return norms if all(isinstance(norm, nn.Module) for norm in norms) else []


def norms_each_head(attention: Any) -> bool:
    """Return whether `head_norms` normalize head by head, and not all heads of a token together."""
    return all(norm.weight.shape == (attention.head_dim,) for norm in head_norms(attention))


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
        reason, name = UNFUSED.get(_class_name(layer)), type(layer).__name__
        return f"{name} is not a supported family" if reason is None else f"{reason} ({name})"
    groups = projections(layer, family)
    if uses_gelu(layer.mlp) is None:
        return "the activation of its MLP is neither SiLU nor GELU (tanh)"
    if family.merged and (layer.resid_attn_dropout.p or layer.resid_mlp_dropout.p):
        return "it has dropout on the residuals"
    if any(len({type(base_of(member)) for member in group}) > 1 for group in groups):
        return "layers with one input have different quantization formats"
    return _why_not_attention(layer.self_attn) or _why_not_weights(layer, family, groups)


def _why_not_attention(attention: Any) -> str | None:
    rope = getattr(attention.config, "rope_parameters", None) or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "RoPE turns only a part of each head"
    norms = head_norms(attention)
    if not norms_each_head(attention) and [norm.weight.numel() for norm in norms] != _part_widths(attention):
        return "the norms of its queries and keys are neither per head nor over all heads"
    if len(set(map(epsilon_of, norms))) > 1:
        return "the norms of its queries and keys have different epsilons"
    return None


def _part_widths(attention: Any) -> list[int]:
    """Return the widths of all query heads and of all key heads."""
    config = attention.config
    return [heads * attention.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)]


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
