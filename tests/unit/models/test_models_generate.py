"""Generation: a batch gives the same as each prompt separately, greedy or with a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from pantheraml.base.errors import DataError, UnsupportedModelError
from pantheraml.models.adapters import apply_method
from pantheraml.models.generate import generate
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.specs.train import MethodConfig, ModelConfig

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2"]
PROMPTS = ["a", "Hello there", "12+30=", "the longest of these five prompts", "xyz"]


def loaded(folder: Path, kind: Any = "full") -> tuple[Any, Any]:
    config = ModelConfig(path=str(folder))
    quantize: Any = "nf4" if kind == "qlora" else None
    model = load_model(config, dtype=torch.float32, device=torch.device("cpu"), quantize=quantize)
    return apply_method(model, MethodConfig(kind=kind, rank=2), seed=0), load_tokenizer(config)


def run(model: Any, tokenizer: Any, prompts: list[Any], **changes: Any) -> list[str]:
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0, "batch_size": 2}
    settings["on_progress"] = lambda done, total: None
    return generate(model, tokenizer, prompts, **{**settings, **changes})


def greedy(model: Any, tokenizer: Any, prompt: str, count: int) -> str:
    """Reference: recompute the whole sequence for each token."""
    ids: list[int] = list(tokenizer(prompt)["input_ids"])
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + count:
            token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            ids.append(token)
    return str(tokenizer.decode(ids[start:], skip_special_tokens=True))


@pytest.mark.seed("S0-007")
@pytest.mark.parametrize("family", FAMILIES)
def test_batched_greedy_matches_the_reference(tiny_model: Callable[..., Path], family: str) -> None:
    model, tokenizer = loaded(tiny_model(family))
    expected = [greedy(model.eval(), tokenizer, prompt, 8) for prompt in PROMPTS]
    assert run(model, tokenizer, PROMPTS, batch_size=5) == expected
    assert run(model, tokenizer, PROMPTS, batch_size=2) == expected
    assert len(set(expected)) > 1


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_adapted_models_generate(tiny_model: Callable[..., Path], kind: str) -> None:
    model, tokenizer = loaded(tiny_model("llama"), kind)
    assert run(model, tokenizer, PROMPTS[:2]) == [greedy(model.eval(), tokenizer, p, 8) for p in PROMPTS[:2]]


def test_sampling_follows_the_seed_and_preserves_the_rng(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    state = torch.get_rng_state()
    first = run(model, tokenizer, PROMPTS, temperature=1.0, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert run(model, tokenizer, PROMPTS, temperature=1.0, seed=1) == first
    assert run(model, tokenizer, PROMPTS, temperature=1.0, seed=2) != first


def test_stops_at_the_end_of_text(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0.0
    plain = run(model, tokenizer, ["a"])[0]
    assert plain
    # end of text now beats the likeliest first token: its logit is three times as large
    first = int(model(input_ids=torch.tensor([tokenizer("a")["input_ids"]])).logits[0, -1].argmax())
    model.lm_head.weight.data[tokenizer.eos_token_id] = 3 * model.lm_head.weight.data[first]
    assert run(model, tokenizer, ["a"]) == [""]


def test_the_models_generation_config_is_ignored(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    greedy_text, sampled = run(model, tokenizer, PROMPTS), run(model, tokenizer, PROMPTS, temperature=1.0)
    theirs = model.generation_config
    theirs.update(repetition_penalty=9.0, top_p=0.1, top_k=2, do_sample=True, no_repeat_ngram_size=1, min_new_tokens=8)
    assert run(model, tokenizer, PROMPTS) == greedy_text
    assert run(model, tokenizer, PROMPTS, temperature=1.0) == sampled
    assert model.generation_config is theirs


def test_prompts_as_tokens(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    assert run(model, tokenizer, [tokenizer(p)["input_ids"] for p in PROMPTS]) == run(model, tokenizer, PROMPTS)


def test_bos_is_added_once_and_eos_never_ends_a_prompt(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    around = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)])
    tokenizer.backend_tokenizer.post_processor = around
    letters = tokenizer("abc", add_special_tokens=False)["input_ids"]
    assert tokenizer("abc")["input_ids"] == [bos, *letters, eos]
    expected = run(model, tokenizer, [[bos, *letters]])
    assert run(model, tokenizer, ["abc"]) == expected
    assert run(model, tokenizer, ["<s>abc"]) == expected


def test_mode_and_progress(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("gpt2"))  # has dropout
    model.train()
    seen: list[tuple[int, int]] = []
    first = run(model, tokenizer, PROMPTS, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert model.training
    assert run(model, tokenizer, PROMPTS) == first
    assert run(model, tokenizer, []) == []


def test_prompts_that_cannot_be_continued(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    with pytest.raises(
        UnsupportedModelError, match="Prompt 2 has 60 tokens; with 8 new ones that exceeds the model's limit of 64"
    ):
        run(model, tokenizer, ["a", "b" * 60])
    with pytest.raises(DataError, match="Prompt 1 has no tokens"):
        run(model, tokenizer, [""])


def test_tokenizer_without_padding_token(tiny_model: Callable[..., Path]) -> None:
    model, tokenizer = loaded(tiny_model("llama"))
    expected = run(model, tokenizer, PROMPTS)
    tokenizer.pad_token = None
    assert run(model, tokenizer, PROMPTS) == expected
