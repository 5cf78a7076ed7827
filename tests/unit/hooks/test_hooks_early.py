"""Passes that begin before TRL logs, or when it takes a batch: the losses are the same, and each pass runs once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from pantheraml import FastLanguageModel
from pantheraml.hooks import trl
from pantheraml.models.causal_lm import fast_model
from pantheraml.models.fast.recorded import LayerGraphs
from tests.toy import write_llama
from tests.unit.models.test_models_fast_recorded import OnCPU, _on_a_cpu

__all__ = ["_on_a_cpu"]

STEPS = 8


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    trl.revert()


class Counts:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replays, self.early = 0, 0
        self.order: list[str] = []
        start, start_early = OnCPU.start, LayerGraphs.start_early

        def counted(recording: Any, given: Any) -> None:
            self.replays += 1
            start(recording, given)

        def counted_early(graphs: Any, hidden: Any, turns: Any) -> bool:
            started = start_early(graphs, hidden, turns)
            self.early += started
            self.order.append("begun")
            return started

        @functools.wraps(SFTTrainer.log)
        def log(trainer: Any, *arguments: Any, **named: Any) -> None:
            self.order.append("logged")
            logs(trainer, *arguments, **named)

        monkeypatch.setattr(OnCPU, "start", counted)
        monkeypatch.setattr(LayerGraphs, "start_early", counted_early)
        logs = SFTTrainer.log
        monkeypatch.setattr(SFTTrainer, "log", log)


def halves(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(0.5)


def callback(event: str, act: Callable[[Any], None]) -> TrainerCallback:
    def method(_self: Any, *_: Any, model: Any, **__: Any) -> None:
        act(model)

    kind: Any = type("Changes", (TrainerCallback,), {event: method})
    return kind()  # type: ignore[no-any-return]


def losses(
    place: Path, *callbacks: TrainerCallback, early: bool = True, kind: Any = SFTTrainer, **changes: Any
) -> list[float]:
    model, tokenizer = FastLanguageModel.from_pretrained(str(write_llama(place / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0, use_gradient_checkpointing=False)
    fast: Any = fast_model(model)
    assert fast.early is not None
    if not early:
        fast.early = None
    rows = [[n, n + 1, n + 2, n + 3] for n in range(3, 43)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * 4 for _ in rows]})
    arguments = SFTConfig(
        output_dir=str(place / "out"), per_device_train_batch_size=2, max_steps=STEPS, report_to="none", seed=3,
        use_cpu=True, bf16=False, learning_rate=1e-2, gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
        **{"save_strategy": "no", "logging_steps": 1, **changes},
    )  # fmt: skip
    trainer = kind(
        model=model, args=arguments, train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_losses_are_the_same_and_no_pass_runs_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    counts = Counts(monkeypatch)
    found = losses(tmp_path / "early", gradient_accumulation_steps=accumulation)
    replays, begun = counts.replays, counts.early
    assert begun >= STEPS - 4
    assert losses(tmp_path / "late", early=False, gradient_accumulation_steps=accumulation) == found
    assert (counts.replays, counts.early) == (2 * replays, begun)


def test_what_is_changed_at_the_end_of_a_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    found = losses(tmp_path / "early", callback("on_step_end", halves))
    assert counts.early
    assert losses(tmp_path / "late", callback("on_step_end", halves), early=False) == found
    assert found != losses(tmp_path / "other")


def test_what_may_be_changed_in_between_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    found = losses(tmp_path / "early", callback("on_step_begin", halves))
    assert not counts.early
    assert losses(tmp_path / "late", callback("on_step_begin", halves), early=False) == found


@pytest.mark.parametrize("when", ["of an instance", "added later"])
def test_callbacks_that_nobody_knew_of_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    counts = Counts(monkeypatch)

    def make() -> TrainerCallback:
        made = TrainerCallback()
        if when == "of an instance":
            made.on_step_begin = lambda *_, model, **__: halves(model)  # type: ignore[method-assign]
        else:
            made.on_train_begin = lambda *_, **__: handlers[-1].add_callback(callback("on_step_begin", halves))  # type: ignore[method-assign]
        return made

    handlers: list[Any] = []
    init = CallbackHandler.__init__

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        handlers.append(self)

    monkeypatch.setattr(CallbackHandler, "__init__", noted)
    found = losses(tmp_path / "early", make())
    assert not counts.early
    assert losses(tmp_path / "late", make(), early=False) == found


def test_evaluation_in_between_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)

    steps = iter(range(STEPS))

    def evaluate(model: Any) -> None:
        if next(steps) != 5:
            return
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.tensor([[3, 4, 5, 6]] * 2))

    found = losses(tmp_path / "early", callback("on_step_end", evaluate))
    assert counts.early
    assert losses(tmp_path / "late", early=False) == found


def test_a_pass_begins_before_the_step_before_it_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    losses(tmp_path)
    assert counts.order[-6:] == ["begun", "logged", "begun", "logged", "logged", "logged"], "the last two: the end"


def test_what_logging_may_change_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    found = losses(tmp_path / "early", callback("on_log", halves))
    assert counts.order[-6:] == ["logged", "begun", "logged", "begun", "logged", "logged"]
    assert losses(tmp_path / "late", callback("on_log", halves), early=False) == found
    assert found != losses(tmp_path / "other")


@pytest.mark.parametrize(
    "changes", [{"eval_strategy": "steps", "eval_steps": 1}, {"save_strategy": "steps", "save_steps": 1}]
)
def test_a_pass_begins_after_evaluation_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    counts = Counts(monkeypatch)
    found = losses(tmp_path / "early", **changes)
    replays, begun = counts.replays, counts.early
    assert losses(tmp_path / "late", early=False, **changes) == found
    assert counts.replays == 2 * replays
    assert begun == (0 if "eval_steps" in changes else STEPS - 3)


def trainer_that_acts(method: str, act: Callable[[Any], None]) -> Any:
    """After what the trainer itself does in `method`."""

    def acts(self: Any, *arguments: Any, **named: Any) -> Any:
        done = getattr(super(kind, self), method)(*arguments, **named)
        act(self.model)
        return done

    kind: Any = type("Own", (SFTTrainer,), {method: acts})
    return kind


def grow(model: Any) -> None:
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.mul_(1.1)


@pytest.mark.parametrize(
    ("method", "act"),
    [("log", halves), ("log", grow), ("_maybe_log_save_evaluate", halves), ("get_batch_samples", grow)],
)
def test_what_a_trainer_of_somebody_elses_changes_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, act: Callable[[Any], None]
) -> None:
    """Frozen weights too, unless through `.data` after a batch was taken."""
    counts = Counts(monkeypatch)
    kind = trainer_that_acts(method, act)
    found = losses(tmp_path / "early", kind=kind)
    assert counts.early
    assert losses(tmp_path / "late", kind=kind, early=False) == found
    assert found != losses(tmp_path / "other")


def test_steps_that_are_not_logged_wait_for_no_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    losses(tmp_path, callback("on_log", lambda _: None), logging_steps=STEPS)
    assert counts.early
    assert counts.order[: counts.early] == ["begun"] * counts.early
