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
}
SHAPES["8b/4"] = SHAPES["8b"] | {"num_hidden_layers": 8}
"""A tiny one for tests, Llama-3.2-1B, Llama-3.1-8B, and the latter with a quarter of its layers."""

SPECIAL = ("<unk>", "<bos>", "<pad>", "<eos>")
"""Last tokens of every vocabulary. Padding has its own token: some trainers mask it in the loss."""

MEAN_LENGTH = 400
SIGMA = 0.8
"""Parameters of the log-normal document lengths; the median is 290 tokens, and one in fifty is over 1,500."""


def write_model(folder: Path, shape: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = SHAPES[shape]["vocab_size"]
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        bos_token_id=size - 3,
        pad_token_id=size - 2,
        eos_token_id=size - 1,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
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
        model_max_length=131072,
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
