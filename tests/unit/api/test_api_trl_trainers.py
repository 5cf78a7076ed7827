"""TRL's trainers over our models and over plain PEFT: the same gradients in every step, and the same weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets.utils.logging import disable_progress_bar
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from pantheraml.base.errors import ConfigError
from pantheraml.hooks import trl as trl_hooks
from pantheraml.models.fast import is_fused
from pantheraml.models.quantize.fp8 import FP8Linear
from tests import toy
from tests.unit.api.trl_runs import (
    SETTINGS,
    STEPS,
    TRAINERS,
    Record,
    dequantized,
    fast_model,
    gradient_error,
    largest_update,
    loaded,
    lora,
    make_trainer,
    plain_base,
    plain_model,
    recorded,
    rows,
    weight_error,
)

GRADIENTS = 5e-5
"""Relative difference of gradients: rounding of float32; 5e-6 was the largest, and 2e-5 over int8."""
WEIGHTS = 1e-5
"""After updates of 1e-2; 3e-7 was the largest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return toy.write_llama(tmp_path_factory.mktemp("trl") / "model", hidden_size=64, initializer_range=0.2)


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def assert_same_training(ours: Any, theirs: Any) -> tuple[Record, Record]:
    mine, other = recorded(ours), recorded(theirs)
    assert len(mine.losses) == STEPS
    assert mine.losses == pytest.approx(other.losses, rel=1e-5, abs=1e-5)
    assert gradient_error(mine, other) <= GRADIENTS
    assert largest_update(other) > 5e-3, "equal because nothing was trained"
    assert weight_error(mine, other) <= WEIGHTS
    return mine, other


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
def test_adapters_of_get_peft_model(folder: Path, tmp_path: Path, kind: str, checkpointing: bool) -> None:
    """The trainer's own activation checkpointing, which is on by default."""
    fast = fast_model(folder)
    assert any(is_fused(layer) for layer in fast.modules())
    plain = plain_model(folder, fast)
    settings = {"gradient_checkpointing": checkpointing}
    assert_same_training(
        make_trainer(kind, fast, folder, tmp_path / "fast", **settings),
        make_trainer(kind, plain, folder, tmp_path / "plain", **settings),
    )
    assert {m.gradient_checkpointing for m in fast.modules() if is_fused(m)} == {checkpointing}


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param(False, marks=pytest.mark.extended, id="stored"), pytest.param(True, id="checkpointed")],
)
def test_adapters_of_the_trainers_peft_config(folder: Path, tmp_path: Path, kind: str, checkpointing: bool) -> None:
    settings = {"peft_config": lora(), "gradient_checkpointing": checkpointing}
    ours = make_trainer(kind, loaded(folder), folder, tmp_path / "fast", **settings)
    theirs = make_trainer(kind, plain_base(folder), folder, tmp_path / "plain", **settings)
    assert any(is_fused(layer) for layer in ours.model.modules())
    set_peft_model_state_dict(theirs.model, get_peft_model_state_dict(ours.model))
    assert_same_training(ours, theirs)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_plain_gradient_descent(folder: Path, tmp_path: Path, kind: str) -> None:
    """Without AdamW, weights differ no more than gradients do, whatever the size of a gradient's elements."""
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    settings = {"optim": "sgd", "learning_rate": 0.1}
    mine, other = assert_same_training(
        make_trainer(kind, fast, folder, tmp_path / "fast", **settings),
        make_trainer(kind, plain, folder, tmp_path / "plain", **settings),
    )
    assert weight_error(mine, other) <= 1e-6


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo", "rloo"])
@pytest.mark.parametrize("mode", [True, "offload", pytest.param("selective", marks=pytest.mark.extended)], ids=str)
def test_reference_passes_between_forward_and_recomputation(folder: Path, tmp_path: Path, kind: str, mode: Any) -> None:
    fast = fast_model(folder, checkpointing=mode)
    plain = plain_model(folder, fast)
    chosen = _checkpointing_of(fast)
    assert_same_training(
        make_trainer(kind, fast, folder, tmp_path / "fast"), make_trainer(kind, plain, folder, tmp_path / "plain")
    )
    assert _checkpointing_of(fast) == chosen, "the trainer suspends it for the reference pass"
    assert all(on for on, _ in chosen)


def _checkpointing_of(model: Any) -> list[tuple[bool, Any]]:
    layers = [module for module in model.modules() if is_fused(module)]
    return [(layer.gradient_checkpointing, vars(layer).get("_gradient_checkpointing_func")) for layer in layers]


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("option", ["load_in_4bit", "load_in_8bit"])
def test_over_quantized_weights(folder: Path, tmp_path: Path, kind: str, option: str) -> None:
    """As plain PEFT over the dequantized weights."""
    place = dequantized(fast_model(folder, **{option: True}), folder, tmp_path / "dense")
    fast = fast_model(folder, **{option: True})
    plain = plain_model(place, fast)
    assert_same_training(
        make_trainer(kind, fast, folder, tmp_path / "fast"), make_trainer(kind, plain, folder, tmp_path / "plain")
    )


@pytest.mark.parametrize("kind", TRAINERS)
def test_over_fp8_weights(tmp_path: Path, kind: str) -> None:
    """fp8 matmuls round their inputs as well, to 3 bits: each result is off by 2 to 3 %, and a gradient by 5 to 8 %.

    Weights are small enough for attention not to amplify that, and later steps of GRPO and RLOO sample other texts.
    """
    folder = toy.write_llama(tmp_path / "model", hidden_size=64, initializer_range=0.05)
    place = dequantized(fast_model(folder, load_in_fp8=True), folder, tmp_path / "dense")
    fast = fast_model(folder, load_in_fp8=True)
    plain = plain_model(place, fast)
    mine = recorded(make_trainer(kind, fast, folder, tmp_path / "fast"))
    other = recorded(make_trainer(kind, plain, folder, tmp_path / "plain"))
    ours, theirs = (torch.cat([g.flatten() for g in run.gradients[0].values()]) for run in (mine, other))
    assert (ours - theirs).norm() <= 0.15 * theirs.norm()
    assert mine.losses == pytest.approx(other.losses, rel=0.02, abs=0.02)
    assert largest_update(mine) > 5e-3


def reward_trainer(model: Any, folder: Path, output: Path, **changes: Any) -> RewardTrainer:
    return RewardTrainer(
        model=model,
        args=RewardConfig(output_dir=str(output), **SETTINGS),
        train_dataset=rows("dpo"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **changes,
    )


def test_reward_trainer_says_that_it_needs_another_model(folder: Path, tmp_path: Path) -> None:
    for model in (loaded(folder), fast_model(folder)):
        with pytest.raises(ConfigError, match="RewardTrainer needs a classifier with one output") as raised:
            reward_trainer(model, folder, tmp_path)
        assert "num_labels=1" in str(raised.value.fix)


def test_reward_trainer_of_a_plain_model_is_untouched(folder: Path, tmp_path: Path) -> None:
    trl_hooks.apply()
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    run = reward_trainer(model, folder, tmp_path, peft_config=lora(task_type="SEQ_CLS"))
    assert largest_update(recorded(run)) > 5e-3


def assert_trains(run: Any) -> None:
    record = recorded(run)
    assert all(tensor.isfinite().all() for tensor in record.weights.values())
    assert largest_update(record) > 1e-3


def test_sft_over_fp8_without_our_hooks(folder: Path, tmp_path: Path) -> None:
    """As with a TRL version that the hooks do not know."""
    losses = []
    for name in ("hooked", "plain"):
        fast = fast_model(folder, load_in_fp8=True)
        if name == "plain":
            trl_hooks.revert()
        run = make_trainer("sft", fast, folder, tmp_path / name)
        assert_trains(run)
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_an_fp8_head_shows_its_weight(folder: Path) -> None:
    head = fast_model(folder, load_in_fp8=True).get_output_embeddings()
    assert isinstance(head, FP8Linear)
    weight = head.weight
    assert torch.equal(weight, head.to_linear(torch.float32).weight)
    assert head.weight is weight, "readers share a copy"
    assert not list(head.parameters())
    assert copy.deepcopy(head).weight is not weight
