"""Text that is handed out while it is generated: whole characters, nothing of a stop string, equal to the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pantheraml.base.errors import DataError
from pantheraml.models.generate import generate
from pantheraml.models.loader import load_model, load_tokenizer
from pantheraml.models.sampling_params import SamplingParams
from pantheraml.models.stream_text import StreamedCompletion, TextStream, stream_text
from pantheraml.specs.train import ModelConfig

PROMPT = "12+30="


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., Path]) -> tuple[Any, Any]:
    config = ModelConfig(path=str(tiny_model("llama")))
    return load_model(config, dtype=torch.float32, device=torch.device("cpu")), load_tokenizer(config)


def streamed(
    loaded: tuple[Any, Any], stop_after: int | None = None, **settings: Any
) -> tuple[list[str], StreamedCompletion]:
    model, tokenizer = loaded
    parts: list[str] = []
    done = stream_text(
        model,
        tokenizer,
        tokenizer(PROMPT)["input_ids"],
        SamplingParams(**{"temperature": 0, "max_tokens": 24, **settings}),
        default_tokens=16,
        hand_out=parts.append,
        is_cancelled=lambda: stop_after is not None and len(parts) >= stop_after,
    )
    return parts, done


def test_the_parts_are_the_text(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    settings = {"max_new_tokens": 24, "temperature": 0.0, "seed": 0, "batch_size": 1}
    (whole,) = generate(model, tokenizer, [PROMPT], on_progress=lambda done, total: None, **settings)
    parts, done = streamed(loaded)
    assert "".join(parts) == whole
    assert len(parts) > 5
    assert (done.finish_reason, done.tokens) == ("length", 24)


def test_a_stop_string_is_not_handed_out_in_parts(loaded: tuple[Any, Any]) -> None:
    whole = "".join(streamed(loaded)[0])
    stop = whole[7:10]
    parts, done = streamed(loaded, stop=["never comes", stop])
    assert "".join(parts) == whole[: whole.find(stop)]
    assert done.finish_reason == "stop"
    assert done.tokens < 24


def test_cancelling_ends_it(loaded: tuple[Any, Any]) -> None:
    parts, done = streamed(loaded, stop_after=3)
    assert (done.finish_reason, len(parts)) == ("cancelled", 3)


def test_a_seed_makes_sampling_repeatable(loaded: tuple[Any, Any]) -> None:
    one, again, other = (streamed(loaded, temperature=1.5, seed=seed)[0] for seed in (1, 1, 2))
    assert one == again != other


def test_lengths(loaded: tuple[Any, Any]) -> None:
    assert streamed(loaded, max_tokens=None)[1].tokens == 16
    with pytest.raises(DataError, match="64 positions"):
        streamed(loaded, max_tokens=1000)


@pytest.mark.parametrize("text", ["größer 😀 als", "日本語", " a  b\n\nc "])
def test_characters_come_whole(loaded: tuple[Any, Any], text: str) -> None:
    _, tokenizer = loaded
    parts: list[str] = []
    stream = TextStream(tokenizer, [], parts.append)
    for token in tokenizer(text)["input_ids"]:
        assert not stream.add([token])
    stream.finish()
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_what_only_looked_like_a_stop_string_comes_later(loaded: tuple[Any, Any]) -> None:
    _, tokenizer = loaded
    parts: list[str] = []
    stream = TextStream(tokenizer, ["abX"], parts.append)
    for character in "1ab":
        stream.add(tokenizer(character)["input_ids"])
    assert parts == ["1"]
    stream.add(tokenizer("c")["input_ids"])
    assert parts == ["1", "abc"]
    for character in "ab":
        stream.add(tokenizer(character)["input_ids"])
    assert not stream.finish()
    assert "".join(parts) == "1abcab"
