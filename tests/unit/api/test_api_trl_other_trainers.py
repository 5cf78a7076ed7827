"""The rest of TRL's trainers over our models and over plain PEFT: the same gradients in every step, the same weights.

They read logits, hidden states or the head's weight in ways of their own, which none of our hooks knows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from transformers import AutoModelForCausalLM, AutoTokenizer

from pantheraml.models.fast import is_fused
from tests import toy
from tests.unit.api.trl_runs import (
    SETTINGS,
    STEPS,
    dequantized,
    fast_model,
    gradient_error,
    largest_update,
    plain_model,
    recorded,
    rows,
    weight_error,
)

TOY = {"hidden_size": 64, "initializer_range": 0.2}
PAIRS = [(row["prompt"], row["completion"]) for row in toy.arithmetic(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disable_progress_bar()
    return toy.write_llama(tmp_path_factory.mktemp("trl") / "model", **TOY)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_llama(tmp_path_factory.mktemp("trl") / "teacher", seed=9, **TOY)


@pytest.fixture(autouse=True)
def _trainers_write_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    yield
    os.environ.clear()
    os.environ.update(before)


def chats() -> Dataset:
    return Dataset.from_list(
        [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": c}]} for p, c in PAIRS]
    )


def hinted() -> Dataset:
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p}], "privileged_context": f"It is {c}"} for p, c in PAIRS]
    )


def triples() -> Dataset:
    return Dataset.from_list(
        [{"prompt": p, "chosen": c, "rejected": c[::-1] + "0", "reference": c + "1"} for p, c in PAIRS]
    )


def lengths(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(each))) for each in completions]


SHORT = {"max_completion_length": 8}
SAMPLED = {**SHORT, "num_generations": 2}
Rows = Callable[[], Dataset]
CASES: dict[str, tuple[str, str, Rows, dict[str, Any], str]] = {
    # name: module, class, rows, settings, what else the trainer needs
    "distillation": ("trl", "Distillation", lambda: rows("grpo"), SHORT, "teacher"),
    "cpo": ("trl.experimental.cpo", "CPO", lambda: rows("orpo"), {}, ""),
    "gkd": ("trl.experimental.gkd", "GKD", chats, {"lmbda": 0.0, "max_new_tokens": 8}, "teacher"),
    "gkd, sampled": ("trl.experimental.gkd", "GKD", chats, {"lmbda": 1.0, "max_new_tokens": 8}, "teacher"),
    "gold": ("trl.experimental.gold", "GOLD", chats, {"lmbda": 0.0, **SHORT}, "teacher"),
    "online dpo": ("trl.experimental.online_dpo", "OnlineDPO", lambda: rows("grpo"), {"max_new_tokens": 8}, "rewards"),
    "tpo": ("trl.experimental.tpo", "TPO", triples, {}, ""),
    "gmpo": ("trl.experimental.gmpo", "GMPO", lambda: rows("grpo"), SAMPLED, "rewards"),
    "a2po": ("trl.experimental.a2po", "A2PO", lambda: rows("grpo"), {**SHORT, "num_value_samples": 2}, "rewards"),
    "sdft": ("trl.experimental.sdft", "SDFT", hinted, SAMPLED, ""),
    "sdpo": ("trl.experimental.sdpo", "SDPO", hinted, SAMPLED, "rewards"),
    "iw opd": ("trl.experimental.iw_opd", "IWOPD", chats, {"lmbda": 1.0, **SHORT}, "teacher"),
}


def make(name: str, model: Any, folder: Path, teacher: Path, output: Path, **changes: Any) -> Any:
    place, kind, data, settings, needs = CASES[name]
    try:
        module = importlib.import_module(place)
        trainer, config = getattr(module, f"{kind}Trainer"), getattr(module, f"{kind}Config")
    except (ImportError, AttributeError):
        pytest.skip(f"this version of TRL has no {kind}Trainer")
    more: dict[str, Any] = {"reward_funcs": lengths} if needs == "rewards" else {}
    if needs == "teacher":
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    return trainer(
        model=model,
        args=config(output_dir=str(output), **{**SETTINGS, **settings, **changes}),
        train_dataset=data(),
        processing_class=AutoTokenizer.from_pretrained(folder),
        **more,
    )


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        ("distillation", False),
        ("distillation", True),
        # experimental in TRL
        *(pytest.param(name, True, marks=pytest.mark.extended) for name in CASES if name != "distillation"),
    ],
)
def test_training_is_that_of_plain_peft(
    folder: Path, teacher: Path, tmp_path: Path, name: str, checkpointing: bool
) -> None:
    fast = fast_model(folder)
    plain = plain_model(folder, fast)
    settings = {"gradient_checkpointing": checkpointing}
    _compare(*(make(name, model, folder, teacher, tmp_path, **settings) for model in (fast, plain)))
    assert {layer.gradient_checkpointing for layer in fast.modules() if is_fused(layer)} == {checkpointing}


@pytest.mark.parametrize("name", ["distillation", pytest.param("cpo", marks=pytest.mark.extended)])
def test_training_over_4_bit_weights_is_that_of_plain_peft(
    folder: Path, teacher: Path, tmp_path: Path, name: str
) -> None:
    place = dequantized(fast_model(folder, load_in_4bit=True), folder, tmp_path / "dense")
    fast = fast_model(folder, load_in_4bit=True)
    plain = plain_model(place, fast)
    _compare(*(make(name, model, folder, teacher, tmp_path) for model in (fast, plain)))


def test_distillation_over_fp8_weights(teacher: Path, tmp_path: Path) -> None:
    """Its loss reads the weight of the fp8 head; see `test_over_fp8_weights` for the tolerances."""
    folder = toy.write_llama(tmp_path / "model", hidden_size=64, initializer_range=0.05)
    place = dequantized(fast_model(folder, load_in_fp8=True), folder, tmp_path / "dense")
    fast = fast_model(folder, load_in_fp8=True)
    plain = plain_model(place, fast)
    mine, other = (recorded(make("distillation", model, folder, teacher, tmp_path)) for model in (fast, plain))
    ours, theirs = (torch.cat([g.flatten() for g in run.gradients[0].values()]) for run in (mine, other))
    assert (ours - theirs).norm() <= 0.15 * theirs.norm()
    assert mine.losses[0] == pytest.approx(other.losses[0], rel=0.02)
    assert largest_update(mine) > 5e-3


def _compare(ours: Any, theirs: Any) -> None:
    mine, other = recorded(ours), recorded(theirs)
    assert len(mine.losses) == STEPS
    assert mine.losses == pytest.approx(other.losses, rel=1e-5, abs=1e-5)
    assert gradient_error(mine, other) <= 5e-5
    assert largest_update(other) > 5e-3, "equal because nothing was trained"
    assert weight_error(mine, other) <= 1e-5
