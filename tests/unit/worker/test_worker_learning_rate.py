"""`train.learning_rate: auto` becomes a number before training, and the run reports it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pantheraml.base.events import ChoiceMade
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.train import resolve_learning_rate


def resolved(rate: Any, hidden: int) -> tuple[TrainConfig, list[Any]]:
    events: list[Any] = []
    with torch.device("meta"):
        sizes = {"intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 16}
        model = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, **sizes))
    config = TrainConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"learning_rate": rate}}
    )
    return resolve_learning_rate(model, config, 500, events.append), events


@pytest.mark.parametrize(("hidden", "expected"), [(4096, 2.9e-4), (64, 2e-4)])
def test_auto_becomes_a_number_and_is_reported(hidden: int, expected: float) -> None:
    config, events = resolved("auto", hidden)
    assert config.train.learning_rate == config.train.peak_learning_rate == expected
    (event,) = events
    assert isinstance(event, ChoiceMade)
    assert (event.name, event.value, event.automatic) == ("train.learning_rate", expected, True)
    assert str(hidden) in event.reason


def test_a_configured_rate_is_left_alone() -> None:
    config, events = resolved(1e-3, 4096)
    assert (config.train.learning_rate, events) == (1e-3, [])
