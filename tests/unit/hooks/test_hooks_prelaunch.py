"""Prelaunch under TRL, before logging or when a batch is taken: same losses, and each pass runs once."""

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
from pantheraml.models.fast.layer_cuda_graphs import LayerGraphs
from tests.toy import write_llama
from tests.unit.models.test_models_fast_layer_graphs import OnCPU, _on_a_cpu

pytestmark = pytest.mark.extended

__all__ = ["_on_a_cpu"]

STEPS = 8


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    trl.revert()


class Counts:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replays, self.prelaunches = 0, 0
        self.order: list[str] = []
        start, prelaunch_replay = OnCPU.start, LayerGraphs.prelaunch_replay

        def counted(captured: Any, inputs: Any) -> None:
            self.replays += 1
            start(captured, inputs)

        def counted_prelaunch(graphs: Any, hidden: Any, rope: Any) -> bool:
            started = prelaunch_replay(graphs, hidden, rope)
            self.prelaunches += started
            self.order.append("launched")
            return started

        @functools.wraps(SFTTrainer.log)
        def log(trainer: Any, *arguments: Any, **kwargs: Any) -> None:
            self.order.append("logged")
            logs(trainer, *arguments, **kwargs)

        monkeypatch.setattr(OnCPU, "start", counted)
        monkeypatch.setattr(LayerGraphs, "prelaunch_replay", counted_prelaunch)
        logs = SFTTrainer.log
        monkeypatch.setattr(SFTTrainer, "log", log)


def halve_weights(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(0.5)


def callback(event: str, act: Callable[[Any], None]) -> TrainerCallback:
    def method(_self: Any, *_: Any, model: Any, **__: Any) -> None:
        act(model)

    kind: Any = type("Changes", (TrainerCallback,), {event: method})
    return kind()  # type: ignore[no-any-return]


def losses(
    folder: Path, *callbacks: TrainerCallback, prelaunch: bool = True, kind: Any = SFTTrainer, **changes: Any
) -> list[float]:
    model, tokenizer = FastLanguageModel.from_pretrained(str(write_llama(folder / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0, use_gradient_checkpointing=False)
    fast: Any = fast_model(model)
    assert fast.prelaunch is not None
    if not prelaunch:
        fast.prelaunch = None
    rows = [[n, n + 1, n + 2, n + 3] for n in range(3, 43)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * 4 for _ in rows]})
    arguments = SFTConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, max_steps=STEPS, report_to="none", seed=3,
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
def test_prelaunch_keeps_losses_and_runs_each_pass_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    counts = Counts(monkeypatch)
    actual = losses(tmp_path / "prelaunch", gradient_accumulation_steps=accumulation)
    replays, launched = counts.replays, counts.prelaunches
    assert launched >= STEPS - 4
    assert losses(tmp_path / "plain", prelaunch=False, gradient_accumulation_steps=accumulation) == actual
    assert (counts.replays, counts.prelaunches) == (2 * replays, launched)


def test_weight_changes_on_step_end_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    actual = losses(tmp_path / "prelaunch", callback("on_step_end", halve_weights))
    assert counts.prelaunches
    assert losses(tmp_path / "plain", callback("on_step_end", halve_weights), prelaunch=False) == actual
    assert actual != losses(tmp_path / "other")


def test_no_prelaunch_with_step_begin_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    actual = losses(tmp_path / "prelaunch", callback("on_step_begin", halve_weights))
    assert not counts.prelaunches
    assert losses(tmp_path / "plain", callback("on_step_begin", halve_weights), prelaunch=False) == actual


@pytest.mark.parametrize("when", ["of an instance", "added later"])
def test_unknown_callbacks_prevent_prelaunch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    counts = Counts(monkeypatch)

    def make() -> TrainerCallback:
        new_callback = TrainerCallback()
        if when == "of an instance":
            new_callback.on_step_begin = lambda *_, model, **__: halve_weights(model)  # type: ignore[method-assign]
        else:
            new_callback.on_train_begin = lambda *_, **__: handlers[-1].add_callback(
                callback("on_step_begin", halve_weights)
            )  # type: ignore[method-assign]
        return new_callback

    handlers: list[Any] = []
    init = CallbackHandler.__init__

    def logged_init(self: Any, *arguments: Any, **kwargs: Any) -> None:
        init(self, *arguments, **kwargs)
        handlers.append(self)

    monkeypatch.setattr(CallbackHandler, "__init__", logged_init)
    actual = losses(tmp_path / "prelaunch", make())
    assert not counts.prelaunches
    assert losses(tmp_path / "plain", make(), prelaunch=False) == actual


def test_evaluation_between_steps_does_not_change_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)

    steps = iter(range(STEPS))

    def evaluate(model: Any) -> None:
        if next(steps) != 5:
            return
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.tensor([[3, 4, 5, 6]] * 2))

    actual = losses(tmp_path / "prelaunch", callback("on_step_end", evaluate))
    assert counts.prelaunches
    assert losses(tmp_path / "plain", prelaunch=False) == actual


def test_prelaunch_precedes_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    losses(tmp_path)
    assert counts.order[-6:] == ["launched", "logged", "launched", "logged", "logged", "logged"], (
        "the last two are the end of training"
    )


def test_no_prelaunch_before_logging_with_log_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    actual = losses(tmp_path / "prelaunch", callback("on_log", halve_weights))
    assert counts.order[-6:] == ["logged", "launched", "logged", "launched", "logged", "logged"]
    assert losses(tmp_path / "plain", callback("on_log", halve_weights), prelaunch=False) == actual
    assert actual != losses(tmp_path / "other")


@pytest.mark.parametrize(
    "changes", [{"eval_strategy": "steps", "eval_steps": 1}, {"save_strategy": "steps", "save_steps": 1}]
)
def test_prelaunch_follows_evaluation_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    counts = Counts(monkeypatch)
    actual = losses(tmp_path / "prelaunch", **changes)
    replays, launched = counts.replays, counts.prelaunches
    assert losses(tmp_path / "plain", prelaunch=False, **changes) == actual
    assert counts.replays == 2 * replays
    assert launched == STEPS - 3


def trainer_that_acts(method: str, act: Callable[[Any], None]) -> Any:
    """Return a trainer class that runs `act` after its own `method`."""

    def acts(self: Any, *arguments: Any, **kwargs: Any) -> Any:
        result = getattr(super(kind, self), method)(*arguments, **kwargs)
        act(self.model)
        return result

    kind: Any = type("Own", (SFTTrainer,), {method: acts})
    return kind


def grow(model: Any) -> None:
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.mul_(1.1)


@pytest.mark.parametrize(
    ("method", "act"),
    [("log", halve_weights), ("log", grow), ("_maybe_log_save_evaluate", halve_weights), ("get_batch_samples", grow)],
)
def test_weight_changes_in_trainer_subclasses_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, act: Callable[[Any], None]
) -> None:
    """Frozen weights too, unless changed through `.data` after a batch was taken."""
    counts = Counts(monkeypatch)
    kind = trainer_that_acts(method, act)
    actual = losses(tmp_path / "prelaunch", kind=kind)
    assert counts.prelaunches
    assert losses(tmp_path / "plain", kind=kind, prelaunch=False) == actual
    assert actual != losses(tmp_path / "other")


def test_unlogged_steps_ignore_log_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    losses(tmp_path, callback("on_log", lambda _: None), logging_steps=STEPS)
    assert counts.prelaunches
    assert counts.order[: counts.prelaunches] == ["launched"] * counts.prelaunches
