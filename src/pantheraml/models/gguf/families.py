"""Model families that can be converted, and what llama.cpp computes for them.

llama.cpp has its own code per architecture, with parts of the config built in. A config that asks for anything else is
refused: the file would load and give other answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.gguf.kinds import SAVE_MERGED

logger = log.get(__name__)

_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")


@dataclass(frozen=True)
class GgufFamily:
    arch: str
    """Name of llama.cpp's architecture in `gguf.MODEL_ARCH`."""
    activations: tuple[str, ...] = _SILU
    """Values of the config's activation that llama.cpp computes."""
    interleaved_rope: bool = False
    """RoPE rotates neighboring values, so rows of the query and key weights are reordered."""
    norm_offset: bool = False
    """transformers multiplies by 1 + weight in norms, llama.cpp by the weight."""
    windows: bool = False
    """llama.cpp attends within a sliding window where the config asks for it."""
    tied_only: bool = False
    """The output head is always the embedding."""
    check: Callable[[Any], str | None] = lambda config: None
    """Return what in the config differs from llama.cpp's code, or None."""


def _gemma_scale(config: Any, largest: int) -> str | None:
    """llama.cpp computes the attention scale from the head size, or, for the largest model, from the hidden size."""
    if config.num_hidden_layers == largest:
        built_in = config.hidden_size // config.num_attention_heads
    else:
        built_in = config.head_dim
    given = config.query_pre_attn_scalar
    return None if given == built_in else f"query_pre_attn_scalar is {given}, not {built_in}"


def _gemma2(config: Any) -> str | None:
    if config.final_logit_softcapping is None or config.attn_logit_softcapping is None:
        return "there is no soft cap of the logits"
    return _gemma_scale(config, 46)


def _gemma3(config: Any) -> str | None:
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "attn_logit_softcapping is set"
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention is set"
    return _gemma_scale(config, 62)


def _smollm3(config: Any) -> str | None:
    built_in = [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]
    return None if list(config.no_rope_layers) == built_in else "no_rope_layers are not every fourth layer"


FAMILIES = {
    "llama": GgufFamily("LLAMA", interleaved_rope=True),
    "mistral": GgufFamily("LLAMA", interleaved_rope=True),
    "qwen2": GgufFamily("QWEN2"),
    "qwen3": GgufFamily("QWEN3"),
    "gemma": GgufFamily("GEMMA", _GELU, norm_offset=True, tied_only=True),
    "gemma2": GgufFamily("GEMMA2", _GELU, norm_offset=True, windows=True, tied_only=True, check=_gemma2),
    "gemma3_text": GgufFamily("GEMMA3", _GELU, norm_offset=True, windows=True, check=_gemma3),
    "phi3": GgufFamily("PHI3"),
    "granite": GgufFamily("GRANITE", interleaved_rope=True),
    "smollm3": GgufFamily("SMOLLM3", interleaved_rope=True, check=_smollm3),
}
"""`model_type` of the config -> family."""


def gguf_family(config: Any) -> GgufFamily:
    """Return the family of a config; UnsupportedModelError if there is none, or llama.cpp computes something else."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"Models of type {config.model_type!r} cannot be converted to GGUF.",
            fix=f"Known types are {', '.join(FAMILIES)}. For others: {SAVE_MERGED}",
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    differs = family.check(config)
    if activation not in family.activations:
        differs = f"the activation is {activation}"
    if family.tied_only and not config.tie_word_embeddings:
        differs = "the output head is not the embedding"
    if differs is not None:
        raise UnsupportedModelError(
            f"This {config.model_type} model cannot be converted to GGUF: {differs}, and llama.cpp would compute"
            " something else.",
            fix="Use a merged save and another engine.",
        )
    window = getattr(config, "sliding_window", None)
    slides = getattr(config, "layer_types", None)
    windowed = "sliding_attention" in slides if slides else window is not None
    if windowed and window is not None and not family.windows and window < config.max_position_embeddings:
        logger.warning(
            "llama.cpp ignores the sliding window of this model: answers differ beyond %d tokens of context", window
        )
    return family
