"""Inputs of throughput benchmarks: models of known shapes with random weights, and data of random words.

Speed and memory do not depend on the values of weights, so nothing needs to be downloaded. Word `t17` is token 17, so
every system reads the same tokens, however it tokenizes.

    python benchmarks/inputs.py 8b FOLDER      write a model and its tokenizer (on the GPU if there is one)
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

LLAMA_3_VOCABULARY = 128_256

FAMILY = "family"
"""Key of a shape that names the transformers family (`model_type`); without it the shape is a Llama's."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "tiny-moe": {
        "family": "qwen3_moe",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    },
    "1b": {
        "vocab_size": LLAMA_3_VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": {
        "vocab_size": LLAMA_3_VOCABULARY,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-4b": {
        "family": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "qwen2.5-3b": {
        "family": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
    },
    "gemma3-4b": {
        "family": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(34)],
        "query_pre_attn_scalar": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
        "tie_word_embeddings": True,
    },
    "mistral-7b": {
        "family": "mistral",
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
SHAPES |= {
    "olmo3-7b": {
        "family": "olmo3",
        "vocab_size": 100_278,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "layer_types": ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(32)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "granite-8b": {
        "family": "granite",
        "vocab_size": 49_159,
        "hidden_size": 4096,
        "intermediate_size": 12_800,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0},
        "tie_word_embeddings": True,
    },
    "smollm3-3b": {
        "family": "smollm3",
        "vocab_size": LLAMA_3_VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65_536,
        "no_rope_layers": [int(layer % 4 != 3) for layer in range(36)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
        "tie_word_embeddings": True,
    },
    "qwen3-32b-half": {
        "family": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "gpt-oss-20b": {
        "family": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
    },
    "qwen3-30b-a3b-half": {
        "family": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
SHAPES |= {
    "3b": {
        "vocab_size": LLAMA_3_VOCABULARY,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": SHAPES["qwen3-4b"]
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-8b": SHAPES["qwen3-4b"] | {"hidden_size": 4096, "intermediate_size": 12_288, "tie_word_embeddings": False},
}
SHAPES["8b/4"] = SHAPES["8b"] | {"num_hidden_layers": 8}
SHAPES["8b-long"] = SHAPES["8b"] | {"max_position_embeddings": 1_048_576}
"""Tiny ones for tests, Llama-3.2-1B, Llama-3.1-8B, the latter with a quarter of its layers or with more positions, and
other families by the name of the model that has this shape. `-half`: half of its layers, as a whole one would not fit
on the disk of a rented machine."""

LLAMA_3 = {
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
"""What the shapes of Llamas have in common."""

SPECIAL = ("<unk>", "<bos>", "<pad>", "<eos>")
"""Last tokens of every vocabulary. Padding has its own token: some trainers mask it in the loss."""

MEAN_LENGTH = 400
SIGMA = 0.8
"""Parameters of the log-normal document lengths; the median is 290 tokens, and one in fifty is over 1,500."""


def family_of(shape: str) -> str:
    """Return the `model_type` of the shape's family."""
    return str(SHAPES[shape].get(FAMILY, "llama"))


def write_model(folder: Path, shape: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, size = family_of(shape), SHAPES[shape]["vocab_size"]
    values = {name: value for name, value in SHAPES[shape].items() if name != FAMILY}
    config = AutoConfig.for_model(
        family,
        bos_token_id=size - 3,
        pad_token_id=size - 2,
        eos_token_id=size - 1,
        **((LLAMA_3 if family == "llama" else {}) | values),
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(default)
    model.save_pretrained(folder, max_shard_size="5GB")
    write_tokenizer(folder, size)


def write_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(size - len(SPECIAL))}
    words |= {token: size - len(SPECIAL) + i for i, token in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>",
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=1 << 20,
    ).save_pretrained(folder)


def write_full_sequences(path: Path, *, shape: str, sequences: int, seq_len: int) -> None:
    """Write documents that fill a sequence exactly."""
    rng = random.Random(1)
    _write(path, [seq_len] * sequences, _words(shape), rng)


def write_uneven_documents(path: Path, *, shape: str, tokens: int, seq_len: int) -> None:
    """Write documents of log-normal lengths, `tokens` in total, none longer than a sequence."""
    rng = random.Random(2)
    center = math.log(MEAN_LENGTH) - SIGMA**2 / 2
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(seq_len, max(16, round(rng.lognormvariate(center, SIGMA)))))
    _write(path, lengths, _words(shape), rng)


def _words(shape: str) -> int:
    return int(SHAPES[shape]["vocab_size"]) - len(SPECIAL)


def _write(path: Path, lengths: list[int], words: int, rng: random.Random) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for length in lengths:
            text = " ".join(f"t{rng.randrange(words)}" for _ in range(length - 1))  # the end token is added
            file.write(json.dumps({"text": text}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    write_model(given.folder, given.shape)


if __name__ == "__main__":
    main()
