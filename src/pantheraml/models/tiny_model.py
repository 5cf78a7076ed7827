"""Tiny models of a given architecture with random weights, to test what a family's code does in milliseconds.

The config's sizes are reduced by name, including windows and chunks, and enough layers are kept to have every layer
type of the model. Requirements of the code beyond known names are not guessed: a family that cannot be built this way,
or stays large, raises `CannotShrinkError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pantheraml.models.loader import attention_for

VOCABULARY, WINDOW = 128, 8
_POSITIONS = 128  # more than in any row
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
_FEWEST_LAYERS, _MOST_LAYERS = 4, 24
_MOST_WEIGHTS = 30_000_000
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def _named(size: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), size)


_SIZES: dict[str, int] = {
    **_named(
        _HIDDEN,
        "hidden_size n_embd d_model dim_model emb_dim embedding_size embedding_dim word_embed_proj_dim"
        " intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim moe_intermediate_size"
        " shared_expert_intermediate_size dim_ff ffn_hidden_size shared_intermediate_size mlp_hidden_size"
        " intermediate_size_mlp hidden_size_per_layer_input"
        " lru_width input_embedding_size output_embedding_size expert_ffn_hidden_size dense_intermediate_size"
        " moe_shared_expert_intermediate_size prefix_dense_intermediate_size",
    ),
    **_named(
        _HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"
        " num_decoder_attention_heads linear_num_value_heads linear_num_heads",
    ),
    **_named(
        _HEAD_DIM,
        "head_dim d_kv d_head attention_head_dim kv_channels qk_nope_head_dim v_head_dim dim_head kv_lora_rank"
        " linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim mamba_headdim",
    ),
    **_named(8, "qk_rope_head_dim rotary_dim state_size ssm_state_size mamba_d_state"),
    **_named(24, "q_lora_rank qk_head_dim"),
    **_named(2, "linear_num_key_heads"),
    **_named(_POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
}
"""Sizes that must fit each other, set whatever their value was."""
_AT_MOST: dict[str, int] = {
    **_named(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts n_groups"),
    **_named(1, "n_group num_group num_expert_group topk_group n_shared_experts num_shared_experts"),
    **_named(VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    **_named(
        WINDOW,
        "sliding_window attention_chunk_size attention_window_size window_size chunk_size mamba_chunk_size block_size"
        " sliding_window_size",
    ),
}
_THRESHOLDS = {"floor_scale": 1, "original_max_position_embeddings": 1, "index_topk": 0, "keep_window_size": 0}
"""Lengths beyond which a family treats tokens differently: from that token on (1), or from the one after it (0)."""
_BLOCKS = ("index_block_size", "index_topk_blocks")
"""Tokens per block, and how many blocks a token attends to."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads")
_LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")
"""RoPE types that change beyond a length, which stays out of reach here: see `rope.py`."""
_NOT_SIZES = ("id2label", "label2id")


class CannotShrinkError(ValueError):
    """This architecture cannot be built small."""


def tiny_model(
    config: Any, kind: Any = None, *, longest: int | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Build the model that `config` describes, small, with random weights, on the CPU; torch's RNG state is preserved.

    `kind`: its class, if known. Thresholds beyond rows of `longest` tokens stay out of reach.
    """
    try:
        small = tiny_config(config, longest)
        settings: dict[str, Any] = {"attn_implementation": attention_for(config)}
        if kind is None:
            settings["trust_remote_code"] = trust_remote_code
        build = AutoModelForCausalLM.from_config if kind is None else kind._from_config
        with torch.device("meta"):
            count = sum(p.numel() for p in build(small, **settings).parameters())
        if count > _MOST_WEIGHTS:
            raise CannotShrinkError(f"it still has {count:,} weights")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model: PreTrainedModel = build(small, dtype=torch.float32, **settings)
            _perturb(model.parameters())
    except CannotShrinkError:
        raise
    # a family's code may raise anything for unexpected sizes
    except Exception as err:
        raise CannotShrinkError(f"{type(err).__name__}: {(str(err).strip().splitlines() or [''])[0]}") from err
    return model.eval()


def _perturb(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make all weights large enough to matter: a zero weight would hide a part of the model."""
    for parameter in parameters:
        if parameter.is_floating_point():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1 if parameter.ndim > 1 else 0.02)


def tiny_config(config: Any, longest: int | None = None) -> Any:
    """Return `config` with small sizes, of the same class."""
    values = config.to_dict()
    values.pop("quantization_config", None)
    small = type(config).from_dict(_shrunk(values, longest))
    small.name_or_path = getattr(config, "name_or_path", "")
    return small


def _shrunk(values: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Shrink the sizes of a config or sub-config."""
    small = {name: _smaller(name, value, longest) for name, value in values.items()}
    small |= _fewer_layers(values, longest)
    for name in _KEY_HEADS:
        heads = next((values[key] for key in ("num_attention_heads", "n_head") if values.get(key)), None)
        if name in values and values[name] in (None, heads):
            small[name] = _HEADS
        elif isinstance(values.get(name), int):
            small[name] = min(values[name], _HEADS // 2)
    if "head_dim" in values and values["head_dim"] is None:
        small["head_dim"] = _HEAD_DIM
    small |= _shrunk_rope(values, small)
    small |= _shrunk_blocks(values, longest)
    if isinstance(values.get("attention_hidden_size"), int):  # of two concatenated hidden states
        small |= {"attention_hidden_size": 2 * _HIDDEN, "attention_head_dim": 2 * _HIDDEN // _HEADS}
    if values.get("qk_rope_head_dim") and values.get("head_dim") == values["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]
    return small | _state_heads(values)


def _shrunk_rope(values: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Fit RoPE factor lists to smaller heads, and keep the length at which they switch beyond any row."""
    ropes = {name: values[name] for name in ("rope_parameters", "rope_scaling") if isinstance(values.get(name), dict)}
    changed: dict[str, Any] = {}
    for name, rope in ropes.items():
        heads = values.get("num_attention_heads") or values.get("n_head") or 1
        size = values.get("head_dim") or (values.get("hidden_size") or 0) // heads or _HEAD_DIM
        lists = {key: value for key, value in rope.items() if key.endswith("_factor") and isinstance(value, list)}
        cut = {key: value[: len(value) * _HEAD_DIM // size] for key, value in lists.items()}
        changed[name] = {**small[name], **cut}
    if "original_max_position_embeddings" in values and "rope_type" not in values:
        changed["original_max_position_embeddings"] = max(values["original_max_position_embeddings"], _POSITIONS)
    return changed


def _out_of_reach(rope: dict[str, Any]) -> dict[str, Any]:
    original = rope.get("original_max_position_embeddings")
    return rope if original is None else {**rope, "original_max_position_embeddings": max(original, _POSITIONS)}


def _shrunk_blocks(values: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Shrink block-sparse attention: smaller blocks, and fewer of them unless tokens attend to all blocks of a row."""
    block, count = (values.get(name) for name in _BLOCKS)
    if not isinstance(block, int) or not isinstance(count, int):
        return {}
    all_seen = longest is not None and block * count >= longest
    return dict(zip(_BLOCKS, (WINDOW, _POSITIONS if all_seen else min(count, 2)), strict=True))


def _smaller(name: str, value: Any, longest: int | None) -> Any:
    if isinstance(value, dict) and name not in _NOT_SIZES:
        return _out_of_reach(value) if value.get("rope_type") in _LENGTH_DEPENDENT_ROPE else _shrunk(value, longest)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and name in _THRESHOLDS:
        out_of_reach = longest is not None and value >= longest + _THRESHOLDS[name]
        return value if out_of_reach else type(value)(min(value, WINDOW))
    if isinstance(value, int) and value > 0 and name in _SIZES:
        return _SIZES[name]
    if isinstance(value, int) and value > 0 and name in _AT_MOST:
        return min(value, _AT_MOST[name])
    if isinstance(value, list) and name in _SIZES:  # one size per layer
        return [_smaller(name, each, longest) for each in value]
    if str(name).endswith("token_id"):
        if isinstance(value, list):
            return [each % VOCABULARY for each in value]
        return value % VOCABULARY if isinstance(value, int) else value
    return value


def _fewer_layers(values: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Keep enough of the first layers to have two of each type; per-layer lists are truncated."""
    count = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), None)
    if not count:
        return {}
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count}
    kinds = list(zip(*(map(str, value) for value in lists.values()), strict=True))
    needed = max((_second(kinds, kind) + 1 for kind in set(kinds)), default=1)
    repeated = (value for name, value in values.items() if "period" in str(name) or "interval" in str(name))
    needed = max(needed, *(value for value in repeated if isinstance(value, int)), _FEWEST_LAYERS)
    shared = values.get("num_kv_shared_layers") or 0
    kept = min(count, min(needed, _MOST_LAYERS) * (2 if shared else 1))
    small: dict[str, Any] = {name: kept for name in _LAYERS if isinstance(values.get(name), int)}
    small |= {name: _smaller(name, value[:kept], longest) for name, value in lists.items()}
    if shared:
        small["num_kv_shared_layers"] = min(shared, kept // 2)
    if isinstance(values.get("per_layer_config"), dict):
        of_layer = values["per_layer_config"].items()
        small["per_layer_config"] = {layer: _shrunk(part, longest) for layer, part in of_layer if int(layer) < kept}
    return small


def _second(kinds: list[tuple[str, ...]], kind: tuple[str, ...]) -> int:
    """Return the index of the second occurrence, or of the only one."""
    return [index for index, each in enumerate(kinds) if each == kind][:2][-1]


def _state_heads(values: dict[str, Any]) -> dict[str, Any]:
    """State-space layers: the number of heads times their size must equal the config's expanded width."""
    small: dict[str, int] = {}
    for heads, size, expand in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
        ("mamba_num_heads", "mamba_head_dim", "expand"),
        ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
        ("num_heads", "head_dim", "expand"),
    ):
        if isinstance(values.get(heads), int) and isinstance(values.get(expand), int) and size in values:
            small |= {size: _HEAD_DIM, heads: values[expand] * _HIDDEN // _HEAD_DIM}
    if isinstance(values.get("mamba_d_ssm"), int):
        small |= {"mamba_d_ssm": 2 * _HIDDEN, "mamba_n_heads": 2 * _HIDDEN // _HEAD_DIM}
    return small
