"""Batched text generation: prompts in, completions out.

Only the settings given here apply: sampling settings that ship with a model (repetition penalty, top-p) would make a
run's output depend on a file that is easily overlooked. The model's end-of-text tokens do apply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, StoppingCriteria

from pantheraml.base import log
from pantheraml.base.errors import DataError, OutOfMemoryError, UnsupportedModelError
from pantheraml.models.eval_mode import eval_no_grad
from pantheraml.models.rope import supported_positions

logger = log.get(__name__)

_GREEDY = {"temperature": None, "top_k": None}

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
    encoded = [encode_prompt(tokenizer, prompt, number) for number, prompt in enumerate(prompts, start=1)]
    _check_lengths(whole, encoded, max_new_tokens)
    stops = stop_tokens(whole, tokenizer)
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": 0} if temperature > 0 else _GREEDY
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=stops or None,
        pad_token_id=pad_token(tokenizer, stops),
        use_cache=True,
        **sampling,
    )
    completions: list[str] = []
    for rows in generate_batches(model, encoded, settings, seed=seed, batch_size=batch_size):
        completions += [_decode_until_stop(tokenizer, row, stops) for row in rows]
        on_progress(len(completions), len(encoded))
    return completions


def generate_batches(
    model: nn.Module,
    encoded: Sequence[list[int]],
    settings: GenerationConfig,
    *,
    seed: int | None,
    batch_size: int,
    criteria: Callable[[Sequence[int], int], StoppingCriteria] | None = None,
    media: Mapping[str, Tensor] | None = None,
) -> Iterator[list[list[int]]]:
    """Yield the new tokens of each prompt, batch by batch, each row padded to its batch.

    `seed` None: draw from the global RNG. `criteria` makes the stopping criteria of a batch from the numbers of its
    prompts and the width of the padded batch. A batch that does not fit in GPU memory is split. `media`: what the
    processor made of the images of a single prompt.
    """
    whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    device = whole.get_input_embeddings().weight.device
    pending = [range(begin, min(begin + batch_size, len(encoded))) for begin in range(0, len(encoded), batch_size)]
    with eval_no_grad(model), _own_rng(seed, device), _generation_config_set(whole, settings):
        while pending:
            numbers = pending.pop(0)
            ids, mask = _left_pad([encoded[number] for number in numbers], settings.pad_token_id or 0, device)
            stopping = [] if criteria is None else [criteria(numbers, ids.shape[1])]
            try:
                out = whole.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=settings,
                    stopping_criteria=stopping,
                    **(media or {}),
                )
            except torch.OutOfMemoryError as err:
                if len(numbers) == 1:
                    raise OutOfMemoryError(
                        f"Generating {settings.max_new_tokens} tokens for one prompt of {ids.shape[1]} tokens does not "
                        "fit in GPU memory.",
                        fix="Generate fewer tokens, or shorten the prompt.",
                    ) from err
                half = len(numbers) // 2
                logger.info("%d prompts do not fit in GPU memory at once: generating %d", len(numbers), half)
                pending = [part for each in (numbers, *pending) for part in _split(each, half)]
                continue
            yield out[:, ids.shape[1] :].tolist()


def _split(numbers: range, size: int) -> list[range]:
    return [numbers[begin : begin + size] for begin in range(0, len(numbers), size)]


@contextlib.contextmanager
def _own_rng(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draw from a generator with this seed and leave the global RNG alone; None: draw from the global RNG."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextlib.contextmanager
def _generation_config_set(whole: Any, settings: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config, from which transformers would fill in unset fields."""
    original, whole.generation_config = whole.generation_config, settings
    try:
        yield
    finally:
        whole.generation_config = original


def encode_prompt(tokenizer: Any, prompt: Prompt, number: int) -> list[int]:
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
    limit = supported_positions(whole.config)
    for number, ids in enumerate(encoded, start=1):
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise UnsupportedModelError(
                f"Prompt {number} has {len(ids)} tokens; with {max_new_tokens} new ones that exceeds the model's "
                f"limit of {limit}.",
                fix="Shorten the prompt, or generate fewer new tokens.",
            )


def stop_tokens(whole: Any, tokenizer: Any) -> list[int]:
    """Return the end-of-text tokens of the tokenizer and of the model (chat models have several)."""
    own = whole.generation_config.eos_token_id if whole.generation_config is not None else None
    named = own if isinstance(own, list) else [own]
    return sorted({token for token in (tokenizer.eos_token_id, *named) if token is not None})


def pad_token(tokenizer: Any, stops: Sequence[int]) -> int:
    return int(next((token for token in (tokenizer.pad_token_id, *stops) if token is not None), 0))


def _left_pad(batch: list[list[int]], pad_token: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, batch))
    ids = torch.tensor([[pad_token] * (width - len(row)) + row for row in batch], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
    return ids, mask


def _decode_until_stop(tokenizer: Any, ids: list[int], stops: list[int]) -> str:
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True))
