"""Generate one completion and hand out its text while it grows.

What has been handed out is never taken back: bytes of an unfinished character, and text that may turn out to be the
beginning of a stop string, are held until it is known what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig, StoppingCriteria

from pantheraml.base.errors import DataError
from pantheraml.models.generate import generate_batches, pad_token, stop_tokens
from pantheraml.models.rope import supported_positions
from pantheraml.models.sampling_params import SamplingParams

_UNFINISHED = "\ufffd"
"""Replacement that a tokenizer writes for an incomplete character."""


@dataclass(frozen=True)
class StreamedCompletion:
    finish_reason: Literal["stop", "length", "cancelled"]
    tokens: int
    """All generated ones, with the token that ended it."""


class TextStream:
    """Turns tokens, as they come, into text that will not change any more."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], hand_out: Callable[[str], None]) -> None:
        self._tokenizer, self._stops, self._hand_out = tokenizer, [stop for stop in stops if stop], hand_out
        self._ids: list[int] = []
        self._begin = self._read = 0
        """Of the tokens that are decoded again with the next ones, and of those not yet in the text."""
        self._held = ""

    def add(self, ids: Sequence[int]) -> bool:
        """Return True if a stop string is complete; what follows is not wanted then."""
        self._ids += ids
        before = self._decode(self._ids[self._begin : self._read])
        text = self._decode(self._ids[self._begin :])
        if len(text) <= len(before) or text.endswith(_UNFINISHED):
            return False
        self._begin, self._read = self._read, len(self._ids)
        return self._take(text[len(before) :])

    def finish(self) -> bool:
        """Emit the text that was held back. Return True if it completes a stop string."""
        before = self._decode(self._ids[self._begin : self._read])
        found = self._take(self._decode(self._ids[self._begin :])[len(before) :])
        self._release(len(self._held))
        return found

    def _take(self, text: str) -> bool:
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._release(min(places))
            self._held = ""
            return True
        lengths = (length for stop in self._stops for length in range(len(stop)) if self._held.endswith(stop[:length]))
        longest = max(lengths, default=0)
        self._release(len(self._held) - longest)
        return False

    def _release(self, length: int) -> None:
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._hand_out(text)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def stream_text(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    default_tokens: int,
    hand_out: Callable[[str], None],
    is_cancelled: Callable[[], bool],
) -> StreamedCompletion:
    """Generate the completion of a prompt of tokens. `default_tokens`: most of them if `params` have no `max_tokens`.

    DataError if the prompt, with `max_tokens`, does not fit into the model's positions.
    """
    most = _room(model, len(prompt), params.max_tokens, default_tokens)
    ends = stop_tokens(model, tokenizer)
    stream = TextStream(tokenizer, params.stop_strings, hand_out)
    watcher = _Watcher(stream, len(prompt), frozenset(ends), is_cancelled)
    settings = GenerationConfig(
        max_new_tokens=most,
        eos_token_id=ends or None,
        pad_token_id=pad_token(tokenizer, ends),
        use_cache=True,
        **params.generation_settings(),
    )
    batches = generate_batches(
        model, [list(prompt)], settings, seed=params.seed, batch_size=1, criteria=lambda numbers, width: watcher
    )
    ((tokens,),) = batches
    if watcher.ended is None:
        watcher.ended = "stop" if tokens and tokens[-1] in ends else "length"
        if stream.finish():
            watcher.ended = "stop"
    return StreamedCompletion(watcher.ended, len(tokens))


def _room(model: nn.Module, prompt: int, wanted: int | None, default: int) -> int:
    limit = supported_positions(model.config)
    if limit is None:
        return wanted or default
    if prompt + (wanted or 1) > limit:
        asked = f"{prompt} tokens" if wanted is None else f"{prompt} tokens, and {wanted} are to follow"
        raise DataError(
            f"The messages have {asked}; the model has {limit} positions.", fix="Shorten them, or lower max_tokens."
        )
    return min(default, limit - prompt) if wanted is None else wanted


class _Watcher(StoppingCriteria):
    """Sees every new token; ends the generation at a stop string and when it is cancelled."""

    def __init__(self, stream: TextStream, width: int, ends: frozenset[int], is_cancelled: Callable[[], bool]) -> None:
        self._stream, self._seen, self._ends, self._is_cancelled = stream, width, ends, is_cancelled
        self.ended: Literal["stop", "length", "cancelled"] | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        new = input_ids[0, self._seen :].tolist()
        self._seen = input_ids.shape[1]
        if self._is_cancelled():
            self.ended = "cancelled"
        elif self._stream.add([token for token in new if token not in self._ends]):
            self.ended = "stop"
        return torch.tensor([self.ended is not None], device=input_ids.device)
