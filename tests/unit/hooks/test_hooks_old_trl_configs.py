"""Old arguments of TRL's configs and trainers: translated, with one warning each, and revertible."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trl

from pantheraml import SamplingParams
from pantheraml.base.errors import ConfigError
from pantheraml.hooks import trl as hooks

CPU: dict[str, Any] = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none"}


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    hooks.apply()
    yield
    hooks.revert()


@pytest.mark.parametrize("name", ["GRPOConfig", "RLOOConfig", "DPOConfig", "KTOConfig", "RewardConfig", "ORPOConfig"])
def test_warmup_ratio(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = getattr(trl, name)(warmup_ratio=0.1, **CPU)
    assert config.warmup_steps == 0.1
    assert f"{name}'s warmup_ratio is called warmup_steps" in caplog.text


def test_max_prompt_length_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trl.GRPOConfig(max_prompt_length=64, **CPU)
    assert "max_prompt_length has no effect" in caplog.text
    with pytest.raises(TypeError, match="max_promt_length"):
        trl.GRPOConfig(max_promt_length=64, **CPU)


def test_sampling_params_set_the_config_s_fields(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(min_p=0.1, top_p=0.9, top_k=-1, seed=1, stop=["x"], max_tokens=99)
    with caplog.at_level(logging.WARNING):
        config = trl.GRPOConfig(vllm_sampling_params=params, temperature=0.7, **CPU)
    assert (config.min_p, config.top_p, config.top_k, config.temperature) == (0.1, 0.9, 0, 0.7)
    assert "seed, stop have no effect" in caplog.text
    with pytest.raises(ConfigError, match=r"top_p=0\.5"):
        trl.GRPOConfig(vllm_sampling_params=params, top_p=0.5, **CPU)


def test_vllm_that_is_not_installed(caplog: pytest.LogCaptureFixture) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with caplog.at_level(logging.WARNING):
        assert trl.GRPOConfig(use_vllm=True, **CPU).use_vllm is False
    assert "vLLM is not installed" in caplog.text


@pytest.mark.parametrize(("batch", "accumulation", "raised"), [(1, 1, 4), (1, 4, 1), (8, 1, 8), (3, 2, 4)])
def test_batches_hold_whole_groups(batch: int, accumulation: int, raised: int) -> None:
    config = trl.GRPOConfig(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, num_generations=4, **CPU
    )
    assert config.per_device_train_batch_size == raised
    assert config.generation_batch_size % 4 == 0


def test_arguments_that_moved_to_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    hooks.revert()
    monkeypatch.setattr(trl.DPOTrainer, "__init__", _recorder(seen))
    hooks.apply()
    config = trl.DPOConfig(**CPU)
    tokenizer = object()
    trl.DPOTrainer(model=None, args=config, beta=0.3, max_length=77, max_prompt_length=5, tokenizer=tokenizer)
    assert (config.beta, config.max_length) == (0.3, 77)
    assert seen["processing_class"] is tokenizer
    with pytest.raises(ConfigError, match="DPOConfig"):
        trl.DPOTrainer(model=None, beta=0.3)
    hooks.revert()


def _recorder(seen: dict[str, Any]) -> Any:
    def init(self: Any, model: Any = None, args: Any = None, processing_class: Any = None) -> None:
        seen.update(args=args, processing_class=processing_class)

    init.__module__ = "trl.trainer.dpo_trainer"
    return init


def test_before_a_model_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    hooks.revert()
    hooks.apply_on_import()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # `from trl import` asks twice
            assert trl.ORPOTrainer.__name__ == "ORPOTrainer"
    assert trl.GRPOConfig(warmup_ratio=0.1, **CPU).warmup_steps == 0.1
    assert caplog.text.count("trl.ORPOTrainer is in") == 1
    hooks.revert()
    with pytest.raises(TypeError, match="warmup_ratio"):
        trl.GRPOConfig(warmup_ratio=0.1, **CPU)


def test_revert() -> None:
    hooks.apply()  # a second model
    assert trl.ORPOTrainer.__name__ == "ORPOTrainer"
    hooks.revert()
    with pytest.raises(AttributeError, match="ORPOTrainer"):
        _ = trl.ORPOTrainer
    with pytest.raises(TypeError, match="warmup_ratio"):
        trl.GRPOConfig(warmup_ratio=0.1, **CPU)
    with pytest.raises(TypeError, match="warmup_ratio"):
        importlib.import_module("trl.experimental.orpo").ORPOConfig(warmup_ratio=0.1, **CPU)
