"""Small deterministic models, tokenizers and data for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def arithmetic(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompt/completion rows of uneven length."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        numbers = [rng.randint(0, 99) for _ in range(rng.randint(2, 9))]
        rows.append({"prompt": "+".join(map(str, numbers)) + "=", "completion": str(sum(numbers))})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


RARE = "~"
"""A character that occurs in no row of `arithmetic`."""


def write_poisoned_llama(folder: Path) -> Path:
    """Write a Llama that gives NaN for text with the RARE character, whose embedding is infinite."""
    import torch
    from safetensors.torch import load_file, save_file

    write_llama(folder)
    weights = load_file(folder / "model.safetensors")
    (token,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(RARE).ids
    weights["model.embed_tokens.weight"][token] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path, *, chat_template: str | None = None, pad: bool = True) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([row["prompt"] + row["completion"] for row in arithmetic(300)], trainer)
    special = {"eos_token": "<eos>"} | ({"pad_token": "<pad>"} if pad else {})
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def write_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a 2-layer Llama with random weights, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_tokenizer(folder, chat_template=TEMPLATE)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{**sizes, "vocab_size": 320, "num_key_value_heads": 2, "max_position_embeddings": 256, **changes},
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_qwen3(folder: Path, *, seed: int = 0) -> Path:
    """Write a 2-layer Qwen3 (QK norm) with tied embeddings."""
    from transformers import Qwen3Config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        **sizes,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=320,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return _write(folder, config, seed)


def write_gpt2(folder: Path, *, seed: int = 0) -> Path:
    """Write a 2-layer GPT-2 without dropout."""
    from transformers import GPT2Config

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=320, n_positions=256, n_embd=32, n_layer=2, n_head=4, **dropout, eos_token_id=1)
    return _write(folder, config, seed)


EXPERT_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}


def write_mixtral(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a 2-layer Mixtral with 4 experts and router auxiliary loss."""
    from transformers import MixtralConfig

    return _write(folder, MixtralConfig(**{**EXPERT_SIZES, "num_local_experts": 4, **changes}), seed)


def write_qwen3_moe(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a 2-layer Qwen3-MoE with 6 experts and router auxiliary loss."""
    from transformers import Qwen3MoeConfig

    own = {"num_experts": 6, "moe_intermediate_size": 16, "head_dim": 8}
    return _write(folder, Qwen3MoeConfig(**{**EXPERT_SIZES, **own, **changes}), seed)


def _write(folder: Path, config: Any, seed: int) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    write_tokenizer(folder, chat_template=TEMPLATE)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
