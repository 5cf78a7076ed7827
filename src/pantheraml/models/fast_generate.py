"""`model.fast_generate`: batched generation with vLLM's arguments and results.

Prompts go through our own batched generation, or through vLLM if the model was loaded with `fast_inference=True` where
that is installed. As with vLLM, the model's own adapter is not used: an adapter comes with `lora_request`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria

from pantheraml.base import log
from pantheraml.base.errors import ConfigError, DataError
from pantheraml.models.generate import encode_prompt, generate_batches, pad_token, stop_tokens
from pantheraml.models.lora_request import adapters_disabled, requested_adapter
from pantheraml.models.rope import supported_positions
from pantheraml.models.sampling_params import SamplingParams, read_sampling_params
from pantheraml.models.vllm_engine import VllmEngine

logger = log.get(__name__)

BATCH = 64
"""Most prompts that are generated at once; fewer if they do not fit in memory."""
_TAIL = 8
"""Tokens that are decoded to look for a stop string, besides one for each of its characters."""

_request_ids = itertools.count()


@dataclass(frozen=True)
class CompletionOutput:
    """One completion, with the fields of vLLM's class of that name."""

    index: int
    text: str
    token_ids: list[int]
    """All generated tokens, with the one that ended it."""
    finish_reason: str
    """`stop`: a stop token or string; `length`: `max_tokens`, or the model's number of positions."""
    stop_reason: int | str | None
    """The token or string of the settings that ended it; None for end-of-text."""
    cumulative_logprob: None = None
    logprobs: None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions, with the fields of vLLM's class of that name."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    lora_request: Any = None


@dataclass
class _Request:
    text: str | None
    ids: list[int]
    most: int
    """New tokens that it may get."""
    media: dict[str, Tensor] | None = None
    """The processor's output for its images."""
    ends: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    """Index of a completion -> its number of tokens and stop string, if it ended by length or a stop string."""


class FastGenerateMixin:
    """Mixin placed before a model's own class."""

    prompt_tokenizer: Any = None
    """The tokenizer that was loaded with the model."""
    prompt_processor: Any = None
    """The processor that was loaded with a vision-language model."""
    vllm_engine: Any = None
    """vLLM's engine, or `NoVllm` where it is not installed, if the model was loaded with `fast_inference=True`."""

    def fast_generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        use_tqdm: bool = False,
        lora_request: Any = None,
    ) -> list[Any]:
        """Return a `RequestOutput` for each prompt.

        `prompts`: a text, token ids, a mapping with `prompt` or `prompt_token_ids`, or a list of these. With `prompt`,
        a vision-language model takes `multi_modal_data={"image": ...}`, an image or a list of them.
        `sampling_params`: `SamplingParams`, vLLM's or ours, or a list of one for each prompt.
        `lora_request`: result of `model.load_lora(folder)`; None: the base model, without any adapter.
        """
        if isinstance(self.vllm_engine, VllmEngine):
            return list(self.vllm_engine.generate(prompts, sampling_params, lora_request))
        if use_tqdm:
            logger.info("fast_generate: use_tqdm has no effect without vLLM")
        return _generate(self, prompts, sampling_params, lora_request)


def _generate(model: Any, prompts: Any, sampling_params: Any, lora_request: Any) -> list[RequestOutput]:
    tokenizer = model.prompt_tokenizer
    if tokenizer is None:
        raise ConfigError(
            "This model has no tokenizer to read prompts with.",
            fix="Load it with FastLanguageModel.from_pretrained, or set model.prompt_tokenizer.",
        )
    given = _as_list(prompts)
    if isinstance(sampling_params, list | tuple):
        if len(sampling_params) != len(given):
            raise ConfigError(
                f"There are {len(given)} prompts and {len(sampling_params)} sampling_params.",
                fix="Pass one for all, or as many as there are prompts.",
            )
        pairs = zip(given, sampling_params, strict=True)
        return [out for one, params in pairs for out in _generate(model, [one], params, lora_request)]
    params = read_sampling_params(sampling_params)
    limit = supported_positions(model.config)
    requests = [_request(model, one, number, params, limit) for number, one in enumerate(given, start=1)]
    if lora_request is not None:
        adapter: contextlib.AbstractContextManager[None] = requested_adapter(model, lora_request)
    else:
        adapter = adapters_disabled(model)
        if any(isinstance(layer, BaseTunerLayer) for layer in model.modules()):
            logger.info("fast_generate without lora_request uses the base model, without its adapter")
    with adapter:
        if any(request.media is not None for request in requests):  # one at a time: images differ in size
            completions = [each for request in requests for each in _complete(model, tokenizer, [request], params)]
        else:
            completions = _complete(model, tokenizer, requests, params)
    return [
        RequestOutput(str(next(_request_ids)), request.text, request.ids, outputs, lora_request=lora_request)
        for request, outputs in zip(requests, completions, strict=True)
    ]


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _request(model: Any, prompt: Any, number: int, params: SamplingParams, limit: int | None) -> _Request:
    text, ids, images = prompt, None, None
    if isinstance(prompt, Mapping):
        text, ids, images = prompt.get("prompt"), prompt.get("prompt_token_ids"), _images(model, prompt, number)
    elif not isinstance(prompt, str):
        text, ids = None, prompt
    if text is None and ids is None:
        raise DataError(f"Prompt {number} has neither prompt nor prompt_token_ids.", fix="Give one of them.")
    media = None
    if images is None:
        encoded = encode_prompt(model.prompt_tokenizer, cast(Any, text if ids is None else ids), number)
    else:
        encoded, media = _with_images(model, text, images)
    room = None if limit is None else limit - len(encoded)
    if room is not None and room < 1:
        raise DataError(
            f"Prompt {number} has {len(encoded)} tokens, and the model has {limit} positions.", fix="Shorten it."
        )
    lengths = [length for length in (params.max_tokens, room) if length is not None]
    if not lengths:
        raise ConfigError("max_tokens=None needs a model with a limited number of positions.", fix="Set max_tokens.")
    return _Request(text, encoded, min(lengths), media)


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "multi_modal_data")


def _images(model: Any, prompt: Mapping[str, Any], number: int) -> list[Any] | None:
    """Return the images of a prompt, None if it has none; ConfigError for what cannot be generated from."""
    media = prompt.get("multi_modal_data") or {}
    unused = sorted(name for name in prompt if name not in _PROMPT_KEYS and prompt[name] is not None)
    unused += sorted(name for name in media if name != "image")
    if unused:
        raise ConfigError(
            f"Prompt {number} has {', '.join(unused)}, which fast_generate does not support.",
            fix=f"Use only {', '.join(_PROMPT_KEYS)}, with images alone.",
        )
    given = media.get("image")
    if given is None:
        return None
    if model.prompt_processor is None or not isinstance(prompt.get("prompt"), str):
        raise ConfigError(
            f"Prompt {number} has images, which need a vision-language model and a text with their placeholders.",
            fix='Load the model with FastVisionModel, and pass the text as "prompt".',
        )
    return list(given) if isinstance(given, list | tuple) else [given]


def _with_images(model: Any, text: str, images: list[Any]) -> tuple[list[int], dict[str, Tensor]]:
    """Return the tokens, with those that the images take, and the processor's other tensors."""
    bos = model.prompt_tokenizer.bos_token
    has_bos = bos is not None and text.startswith(bos)
    encoded = model.prompt_processor(
        text=[text], images=[images], add_special_tokens=not has_bos, return_tensors="pt"
    ).to(model.device)
    media = {name: value for name, value in encoded.items() if name not in ("input_ids", "attention_mask")}
    return encoded["input_ids"][0].tolist(), media


def _complete(
    model: Any, tokenizer: Any, requests: Sequence[_Request], params: SamplingParams
) -> list[list[CompletionOutput]]:
    eos = [] if params.ignore_eos else stop_tokens(model, tokenizer)
    stops = sorted({*eos, *(params.stop_token_ids or [])})
    settings = GenerationConfig(
        max_new_tokens=max((request.most for request in requests), default=1),
        eos_token_id=stops or None,
        pad_token_id=pad_token(tokenizer, stops),
        use_cache=True,
        **params.generation_settings(),
    )

    def criteria(numbers: Sequence[int], width: int) -> StoppingCriteria:
        return _RowEnds(tokenizer, [requests[number] for number in numbers], width, params)

    rows = [
        row
        for batch in generate_batches(
            model,
            [request.ids for request in requests],
            settings,
            seed=params.seed,
            batch_size=max(1, BATCH // params.n),
            criteria=criteria,
            media=requests[0].media if requests else None,
        )
        for row in batch
    ]
    numbered = enumerate(requests)
    return [
        [
            _output(tokenizer, request, index, rows[number * params.n + index], stops, eos, params)
            for index in range(params.n)
        ]
        for number, request in numbered
    ]


class _RowEnds(StoppingCriteria):
    """Ends each row at its own length, or at a stop string, and notes where."""

    def __init__(self, tokenizer: Any, requests: Sequence[_Request], width: int, params: SamplingParams) -> None:
        self._tokenizer, self._width, self._params = tokenizer, width, params
        # as transformers repeats the prompts
        self._rows = [(request, index) for request in requests for index in range(params.n)]
        self._stops = params.stop_strings
        self._tail = max(map(len, self._stops), default=0) + _TAIL

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        count = input_ids.shape[1] - self._width
        tails = input_ids[:, self._width :][:, -self._tail :].tolist() if self._stops else None
        for row, (request, index) in enumerate(self._rows):
            if index in request.ends:
                continue
            found = None
            if tails is not None and count > self._params.min_tokens:
                text = _decode(self._tokenizer, tails[row], self._params)
                found = next((stop for stop in self._stops if stop in text), None)
            if found is not None or count >= request.most:
                request.ends[index] = count, found
        ended: Tensor = torch.tensor([index in request.ends for request, index in self._rows], device=input_ids.device)
        return ended


def _output(
    tokenizer: Any,
    request: _Request,
    index: int,
    row: list[int],
    stops: Sequence[int],
    eos: Sequence[int],
    params: SamplingParams,
) -> CompletionOutput:
    end, stop = request.ends.get(index, (len(row), None))
    first_stop = next((place for place, token in enumerate(row[:end]) if token in stops), None)
    if first_stop is not None:
        ids = row[: first_stop + 1]
        text = _decode(tokenizer, ids if params.include_stop_str_in_output else ids[:-1], params)
        return CompletionOutput(index, text, ids, "stop", None if ids[-1] in eos else ids[-1])
    ids = row[:end]
    text = _decode(tokenizer, ids, params)
    if stop is None:
        return CompletionOutput(index, text, ids, "length", None)
    begin = text.find(stop)
    end_of_text = begin + len(stop) if params.include_stop_str_in_output else begin
    return CompletionOutput(index, text[: max(0, end_of_text)], ids, "stop", stop)


def _decode(tokenizer: Any, ids: list[int], params: SamplingParams) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens))
