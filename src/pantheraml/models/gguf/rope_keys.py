"""RoPE of a config as GGUF keys and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.models.gguf.kinds import SAVE_MERGED

_KNOWN = ("default", "linear", "yarn", "llama3", "longrope")


def main_rope(config: Any) -> Mapping[str, Any]:
    """Return the parameters of the layers that attend to everything."""
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    main: Mapping[str, Any] = parameters.get("full_attention", parameters)
    kind = main.get("rope_type", "default")
    if kind not in _KNOWN:
        raise UnsupportedModelError(
            f"RoPE of type {kind!r} cannot be converted to GGUF.", fix=f"Supported are {', '.join(_KNOWN)}."
        )
    if kind == "yarn":
        _check_yarn(main)
    return main


def _check_yarn(rope: Mapping[str, Any]) -> None:
    """llama.cpp computes these from the factor."""
    expected = {"attention_factor": 0.1 * math.log(rope["factor"]) + 1, "beta_fast": 32, "beta_slow": 1}
    for name, value in expected.items():
        if rope.get(name) is not None and not math.isclose(rope[name], value, rel_tol=1e-4):
            raise UnsupportedModelError(f"YaRN with {name}={rope[name]} cannot be converted to GGUF.", fix=SAVE_MERGED)
    other = [name for name in ("mscale", "mscale_all_dim") if rope.get(name) is not None]
    if other or rope.get("truncate") is False:
        raise UnsupportedModelError(
            f"YaRN with {other[0] if other else 'truncate'} cannot be converted to GGUF.", fix=SAVE_MERGED
        )


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_size(config: Any) -> int:
    """Return how many values of a head are rotated."""
    return int(head_size(config) * main_rope(config).get("partial_rotary_factor", 1.0))


def add_rope_keys(writer: Any, config: Any) -> None:
    from gguf import RopeScalingType

    rope = main_rope(config)
    writer.add_rope_dimension_count(rope_size(config))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    sliding = (config.rope_parameters or {}).get("sliding_attention")
    if sliding is not None:
        if sliding.get("rope_type", "default") != "default":
            raise UnsupportedModelError("Scaled RoPE in sliding layers cannot be converted to GGUF.", fix=SAVE_MERGED)
        writer.add_rope_freq_base_swa(float(sliding["rope_theta"]))
    match rope.get("rope_type", "default"):
        case "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(rope["factor"]))
        case "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(float(rope["factor"]))
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            writer.add_rope_scaling_orig_ctx_len(int(original))
        case "longrope":
            _, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))
            writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
            writer.add_rope_scaling_attn_factors(float(attention_factor))


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Return divisors of the RoPE frequencies, by their names in the file."""
    rope = main_rope(config)
    match rope.get("rope_type", "default"):
        case "llama3":
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
            size = rope_size(config)
            plain = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
            return {"rope_freqs.weight": plain / scaled}
        case "longrope":
            return {
                "rope_factors_long.weight": torch.tensor(rope["long_factor"], dtype=torch.float32),
                "rope_factors_short.weight": torch.tensor(rope["short_factor"], dtype=torch.float32),
            }
    return {}
