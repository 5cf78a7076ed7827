"""GGUF files in llama.cpp itself: its logits, greedy tokens and tokenization are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml import FastLanguageModel
from pantheraml.models.gguf.save import save_gguf
from tests.unit.models.conftest import COMMON
from tests.unit.models.gguf_tokenizers import SIZE, TEXT, tokenizer

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: test_models_gguf.py reads the files back instead"
)

SIZES = {**COMMON, "vocab_size": SIZE, "max_position_embeddings": 128, "initializer_range": 0.3}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 3.0, 5.0],
}  # fmt: skip
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None, "original_max_position_embeddings": 128}),
    "phi3, longrope": ("phi3", {"sliding_window": None, "rope_parameters": LONG}),
    "granite": (
        "granite",
        {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
}  # fmt: skip
PROMPT = [3, 77, 150, 9, 210, 33, 34, 35, 300, 12, 5, 260, 41]


def tiny(family: str, changes: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **changes}))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases start as constants, which would hide a wrong one
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
            elif "lm_head" not in name and "embed" not in name:
                parameter.data.mul_(1.5)
    model.config.name_or_path = "tiny"  # llama.cpp expects certain tokens of models named phi-3
    return model.eval()


@contextmanager
def opened(file: Path, **settings: Any) -> Iterator[Any]:
    # keys and values in float32: the default f16 alone changes logits by 0.5 %
    cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    model = llama_cpp.Llama(str(file), n_ctx=128, n_threads=1, verbose=False, logits_all=True, **cache, **settings)
    try:
        yield model
    finally:
        model.close()


def logits_in_llama_cpp(file: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    with opened(file) as model:
        model.eval(ids)
        return np.array(model.scores[: len(ids)])


def greedy_in_llama_cpp(file: Path, ids: list[int], count: int) -> list[int]:
    with opened(file) as model:
        made: list[int] = []
        model.eval(ids)
        for _ in range(count):
            made.append(int(np.argmax(model.scores[model.n_tokens - 1])))
            model.eval(made[-1:])
    return made


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], float]:
    """Return the tokens, and the smallest gap between the first two logits relative to their spread."""
    made: list[int] = []
    gap = float("inf")
    for _ in range(count):
        with torch.no_grad():
            last = model(torch.tensor([ids + made])).logits[0, -1]
        top = last.topk(2).values
        gap = min(gap, float((top[0] - top[1]) / last.std()))
        made.append(int(last.argmax()))
    return made, gap


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny(*MODELS[name])
    (file,) = save_gguf(model, tmp_path / "out", tokenizer("gpt-2"), "f32")
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    actual = logits_in_llama_cpp(file, PROMPT)
    tolerance = 1e-3 if "gemma" in name else 1e-4  # llama.cpp reads GELU from a table in f16
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


TEXTS = [*TEXT[:4], "<|user|>the <tool> hat</s>", "1234567 \u4f60\u597d \U0001f600 naïve", "   two  \n\n\n lines  "]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe", "llama", "gemma"])
def test_text_is_tokenized_as_by_the_tokenizer(tmp_path: Path, kind: str) -> None:
    own = tokenizer(kind)
    (file,) = save_gguf(tiny("llama", {"num_hidden_layers": 1}), tmp_path / "out", own, "f16")
    with opened(file, vocab_only=True) as model:
        for text in TEXTS:
            ids = model.tokenize(text.encode(), add_bos=False, special=True)
            assert ids == own(text, add_special_tokens=False)["input_ids"], text
        assert (model.token_bos(), model.token_eos()) == (own.bos_token_id, own.eos_token_id)


def test_greedy_tokens_of_a_trained_adapter_are_those_of_transformers(tmp_path: Path) -> None:
    own = tokenizer("gpt-2")
    folder = tmp_path / "model"
    tiny("llama", {}).save_pretrained(folder)
    own.save_pretrained(folder)
    model, _ = FastLanguageModel.from_pretrained(str(folder), device_map="cpu", dtype=torch.float32)
    adapted: Any = FastLanguageModel.get_peft_model(model, r=8)
    ids = torch.tensor([PROMPT])
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.02)
    for _ in range(60):
        adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.eval()
    files = adapted.save_pretrained_gguf(tmp_path / "out", own, quantization_method=["Q8_0", "f16", "bf16"])
    assert [Path(file).name for file in files] == ["out.Q8_0.gguf", "out.F16.gguf", "out.BF16.gguf"]
    expected, gap = greedy(adapted, PROMPT[:3], 8)
    assert gap > 0.2, "a near tie would decide nothing"
    assert expected == PROMPT[3:11], "it has learned the row"
    for file in files:
        assert greedy_in_llama_cpp(Path(file), PROMPT[:3], 8) == expected, file
