"""Tiny random models of every tested family, each a folder with weights and a byte-level tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

VOCABULARY = 264
LIMIT = 64

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
    "initializer_range": 0.2,  # large enough that logits differ by more than rounding
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": {**COMMON, "sliding_window": 4},
    "qwen2": {**COMMON, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {**COMMON, "head_dim": 8},
    "gemma": {**COMMON, "head_dim": 8},
    "phi3": {**COMMON, "sliding_window": 4, "original_max_position_embeddings": LIMIT},
    "gpt2": {
        **{name: COMMON[name] for name in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")},
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LIMIT,
    },
    "gemma2": {**COMMON, "head_dim": 8, "sliding_window": 4},
    "granite": {**COMMON, "logits_scaling": 2.0},
}  # fmt: skip

TinyModel = Callable[..., Path]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: number for number, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="session", autouse=True)
def _quiet_transformers() -> Any:
    disable_progress_bar()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    enable_progress_bar()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model("llama", **config changes)` -> that model's folder, built once per session: do not write to it."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = family, repr(sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(len(family))
                config = AutoConfig.for_model(family, **{**FAMILIES[family], **changes})
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make
