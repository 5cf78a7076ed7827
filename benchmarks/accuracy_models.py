"""Small models of the families whose layers are fused, as `accuracy.py` trains them from scratch."""

from __future__ import annotations

from typing import Any

FAMILIES = {"llama": "Llama", "qwen3": "Qwen3", "gemma3": "Gemma 3"}


def model_config(
    family: str, *, vocabulary: int, hidden: int, intermediate: int, layers: int, head_dim: int, seq_len: int
) -> Any:
    """Return the transformers config of a `family` in this size; Qwen3 and Gemma 3 norm their queries and keys.

    Gemma 3 has a sliding window in every layer but the last, which spans a quarter of a sequence.
    """
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

    heads = hidden // head_dim
    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(count for count in range(1, max(1, heads // 3) + 1) if heads % count == 0),
        "head_dim": head_dim,
        "max_position_embeddings": seq_len,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    if family == "gemma3":
        window = {"sliding_window": seq_len // 4, "query_pre_attn_scalar": head_dim}
        kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
        return Gemma3TextConfig(architectures=["Gemma3ForCausalLM"], **shape, **window, layer_types=kinds)
    if family == "qwen3":
        return Qwen3Config(architectures=["Qwen3ForCausalLM"], **shape, tie_word_embeddings=True)
    return LlamaConfig(architectures=["LlamaForCausalLM"], **shape)
