"""Batched text generation: prompts in, completions out.

Only the settings given here apply: sampling settings that ship with a model (repetition penalty, top-p) would make a
run's output depend on a file nobody looks at. The model's end-of-text tokens do apply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig

from pantheraml.base.errors import DataError, UnsupportedModelError
from pantheraml.models.eval_mode import eval_no_grad

Prompt = str | Sequence[int]
"""Text, or token ids formatted as in training."""

GenerateProgress = Callable[[int, int], None]
"""Called with (prompts done, prompts in total)."""


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    on_progress: GenerateProgress,
) -> list[str]:
    """Return the completion of each prompt, up to the end-of-text token; temperature 0 is greedy decoding."""
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    encoded = [_encode(tokenizer, prompt, number) for number, prompt in enumerate(prompts, start=1)]
    _check_lengths(whole, encoded, max_new_tokens)
    stops = _stop_tokens(whole, tokenizer)
    pad_token = next((token for token in (tokenizer.pad_token_id, *stops) if token is not None), 0)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        top_k=0 if temperature > 0 else None,
        eos_token_id=stops or None,
        pad_token_id=pad_token,
        use_cache=True,
    )
    device = whole.get_input_embeddings().weight.device
    completions: list[str] = []
    fork = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
    with eval_no_grad(model), fork, _generation_config_set(whole, settings):
        torch.manual_seed(seed)
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            ids, mask = _left_pad(batch, pad_token, device)
            out = whole.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
            completions += [_decode_until_stop(tokenizer, row, stops) for row in out[:, ids.shape[1] :].tolist()]
            on_progress(len(completions), len(encoded))
    return completions


@contextlib.contextmanager
def _generation_config_set(whole: Any, settings: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config, from which transformers would fill in unset fields."""
    original, whole.generation_config = whole.generation_config, settings
    try:
        yield
    finally:
        whole.generation_config = original


def _encode(tokenizer: Any, prompt: Prompt, number: int) -> list[int]:
    if isinstance(prompt, str):
        # chat templates add the BOS token themselves
        has_bos = tokenizer.bos_token is not None and prompt.startswith(tokenizer.bos_token)
        ids = list(tokenizer(prompt, add_special_tokens=not has_bos)["input_ids"])
        # some tokenizers append EOS; a prompt must stay open
        while ids and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
    else:
        ids = list(prompt)
    if not ids:
        raise DataError(f"Prompt {number} has no tokens: {prompt!r}.", fix="Give a prompt with some text.")
    return ids


def _check_lengths(whole: Any, encoded: list[list[int]], max_new_tokens: int) -> None:
    limit = getattr(whole.config.get_text_config(), "max_position_embeddings", None)
    for number, ids in enumerate(encoded, start=1):
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise UnsupportedModelError(
                f"Prompt {number} has {len(ids)} tokens; with {max_new_tokens} new ones that exceeds the model's "
                f"limit of {limit}.",
                fix="Shorten the prompt, or generate fewer new tokens.",
            )


def _stop_tokens(whole: Any, tokenizer: Any) -> list[int]:
    """Return the end-of-text tokens of the tokenizer and of the model (chat models have several)."""
    own = whole.generation_config.eos_token_id if whole.generation_config is not None else None
    named = own if isinstance(own, list) else [own]
    return sorted({token for token in (tokenizer.eos_token_id, *named) if token is not None})


def _left_pad(batch: list[list[int]], pad_token: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, batch))
    ids = torch.tensor([[pad_token] * (width - len(row)) + row for row in batch], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
    return ids, mask


def _decode_until_stop(tokenizer: Any, ids: list[int], stops: list[int]) -> str:
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True))
