"""Sampling settings by vLLM's names: our own class, and any other object that has the same attributes.

Scripts pass vLLM's `SamplingParams`. An attribute that asks for something which is not done here is an error; one that
nobody knows is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pantheraml.base import log
from pantheraml.base.errors import ConfigError

logger = log.get(__name__)

_GREEDY_BELOW = 1e-5
"""Temperature under which vLLM decodes greedily."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of `model.fast_generate`, with vLLM's names and defaults."""

    n: int = 1
    """Completions of each prompt."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """None: draw from torch's global RNG."""
    max_tokens: int | None = 16
    """Most tokens of a completion; None: up to the model's number of positions."""
    min_tokens: int = 0
    stop: str | list[str] | None = None
    """Strings that end a completion."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion, besides the model's end-of-text tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def __post_init__(self) -> None:
        limits: dict[str, bool] = {
            "n": self.n >= 1,
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= -1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": self.repetition_penalty > 0,
            "max_tokens": self.max_tokens is None or self.max_tokens >= 1,
            "min_tokens": 0 <= self.min_tokens <= (self.min_tokens if self.max_tokens is None else self.max_tokens),
        }
        for name, valid in limits.items():
            if not valid:
                raise ConfigError(
                    f"SamplingParams has {name}={getattr(self, name)!r}, which is out of range.",
                    fix=f"Set {name} within its range: see pantheraml.SamplingParams.",
                )
        if self.n > 1 and self.is_greedy:
            raise ConfigError(
                f"SamplingParams has n={self.n} with temperature={self.temperature:g}: greedy decoding has one result.",
                fix="Use n=1, or a higher temperature.",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def stop_strings(self) -> list[str]:
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    def generation_settings(self) -> dict[str, Any]:
        """Return what transformers' GenerationConfig calls these settings; lengths and stops excepted."""
        if self.is_greedy:
            sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None}
        else:
            sampling = {
                "do_sample": True,
                "temperature": self.temperature,
                "top_k": max(0, self.top_k),
                "top_p": self.top_p,
                "min_p": self.min_p or None,
                "num_return_sequences": self.n,
            }
        return {**sampling, "repetition_penalty": self.repetition_penalty, "min_new_tokens": self.min_tokens or None}


# Attributes of vLLM's class that are not supported, and their values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,), "frequency_penalty": (0.0,), "logprobs": (None,), "prompt_logprobs": (None,),
    "best_of": (None, 1), "bad_words": (None, []), "logit_bias": (None, {}), "allowed_token_ids": (None,),
    "logits_processors": (None, []), "truncate_prompt_tokens": (None,), "guided_decoding": (None,),
    "structured_outputs": (None,), "extra_args": (None, {}), "detokenize": (True,), "use_beam_search": (False,),
    "flat_logprobs": (False,), "logprob_token_ids": (None,), "thinking_token_budget": (None,),
    "repetition_detection": (None,),
}  # fmt: skip
# Of vLLM's own bookkeeping: how results are streamed and texts joined.
_INTERNAL = {
    "output_kind", "output_text_buffer_length", "spaces_between_special_tokens", "skip_reading_prefix_cache",
    "skip_clone",
}  # fmt: skip
_KNOWN = [each.name for each in fields(SamplingParams)]


def read_sampling_params(given: Any) -> SamplingParams:
    """Return the settings in `given`: None, a mapping, or an object with attributes of vLLM's names."""
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    values = _attributes(given)
    if not set(values) & {*_KNOWN, *_NEUTRAL}:
        raise ConfigError(
            f"sampling_params is a {type(given).__name__}, without attributes such as temperature.",
            fix="Pass a pantheraml.SamplingParams.",
        )
    unknown = []
    for name, value in values.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise ConfigError(
                f"sampling_params has {name}={value!r}, which is not supported without vLLM.", fix="Remove it."
            )
        if name not in _KNOWN and name not in _NEUTRAL and name not in _INTERNAL:
            unknown.append(name)
    if unknown:
        logger.warning("attributes of sampling_params without effect: %s", ", ".join(unknown))
    known = {name: values[name] for name in _KNOWN if name in values}
    try:
        return SamplingParams(**known)
    except TypeError as err:  # a value that cannot be compared with a number
        raise ConfigError(
            f"sampling_params has a value of the wrong type: {err}.",
            fix="Pass numbers, as SamplingParams documents them.",
        ) from err


def _attributes(given: Any) -> dict[str, Any]:
    """Return the public fields of a mapping, a msgspec struct (vLLM's class), or any other object."""
    if isinstance(given, Mapping):
        return dict(given)
    names = getattr(type(given), "__struct_fields__", None) or vars(given)
    return {name: getattr(given, name) for name in names if not name.startswith("_")}
