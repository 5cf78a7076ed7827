"""Learning rates that runs take by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from pantheraml.planner.defaults import learning_rate_choice, rank_choice
from pantheraml.specs.train import TrainConfig


def choice(model_type: str | None, hidden: int | None, steps: int | None = 1000, **sections: Any) -> tuple[Any, str]:
    values = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, **sections}
    made = learning_rate_choice(TrainConfig.model_validate(values), model_type, hidden, steps)
    assert made.name == "train.learning_rate"
    assert made.automatic
    return made.value, made.reason


@pytest.mark.parametrize(
    ("model_type", "hidden", "kind", "expected"),
    [
        ("llama", 4096, "lora", 2.9e-4),  # both as published for the 8B models
        ("qwen3", 4096, "lora", 4.7e-4),
        ("qwen2", 4096, "qlora", 4.7e-4),
        ("llama", 2048, "full", 4.9e-5),
        ("llama", 1024, "full", 8.4e-5),
        ("llama", 576, "lora", 1.3e-3),
        ("llama", 256, "lora", 2.5e-3),  # the best of ten was 4e-3, then 2e-3
    ],
)
def test_by_hidden_size_family_and_method(model_type: str, hidden: int, kind: str, expected: float) -> None:
    value, reason = choice(model_type, hidden, method={"kind": kind})
    assert value == expected
    assert f"hidden size {hidden}" in reason
    assert "not calibrated" not in reason


def test_another_family_is_said_to_be_uncalibrated() -> None:
    value, reason = choice("mistral", 4096)
    assert value == choice("llama", 4096)[0]
    assert "not calibrated for mistral, Llama's exponent is used" in reason


def test_short_runs_take_a_higher_rate() -> None:
    value, reason = choice("llama", 4096, steps=99)
    assert value == 4.3e-4
    assert "fewer than 100 steps" in reason
    assert choice("llama", 4096, steps=100)[0] == choice("llama", 4096, steps=None)[0] == 2.9e-4


@pytest.mark.parametrize(
    ("hidden", "method", "words"),
    [
        (None, {}, "hidden size of the model is not known"),
        (255, {}, "below 256"),
        (1023, {"kind": "full"}, "below 1024"),
        (4096, {"rslora": True}, "rslora"),
    ],
)
def test_the_usual_rate_where_no_rule_holds(hidden: int | None, method: dict[str, Any], words: str) -> None:
    value, reason = choice("llama", hidden, method=method)
    assert value == 2e-4
    assert words in reason


def test_a_configured_rate_stays() -> None:
    config = TrainConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"learning_rate": 1e-3}}
    )
    made = learning_rate_choice(config, "llama", 4096, 10)
    assert (made.value, made.automatic) == (1e-3, False)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (30e6, "41.9 million adapter parameters for about 30.0 million trained tokens"),
        (50e6, "for about 50.0 million trained tokens: method.rank=32 would cover them"),
        (500e6, "method.rank=256 would cover them"),
        (
            2e9,
            "about 2.0 billion trained tokens: more than adapters of rank 256 hold, so method.kind=full may learn more",
        ),
        (900, "for about 900 trained tokens"),
    ],
)
def test_adapters_are_compared_with_the_tokens_they_train_on(tokens: float, words: str) -> None:
    config = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}})
    made = rank_choice(config, 41_943_040, tokens)
    assert made is not None
    assert (made.name, made.value, made.automatic) == ("method.rank", 16, False)
    assert made.reason.endswith(words)


def test_a_full_fine_tune_has_no_rank() -> None:
    config = TrainConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "method": {"kind": "full"}})
    assert rank_choice(config, 1, 1e9) is None
