"""Packing is for models that compute the same without it: what a run makes of the others, and the losses of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.base.events import EventWriter, read_events
from pantheraml.models.tiny import tiny_config
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.train import for_padded_rows, open_data
from tests import toy
from tests.harness import make_plan, make_run, train_here

REASON = "computes other values for packed documents than for each alone"


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """A small random model for the tokenizer of the toys."""
    small = tiny_config(AutoConfig.for_model(family, **changes), longest=64)
    small.vocab_size, small.initializer_range = 320, 0.2
    small.bos_token_id = small.eos_token_id = small.pad_token_id = 1
    for name in ("dropout", "attention_dropout"):
        if hasattr(small, name):
            setattr(small, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(folder)
    toy.write_tokenizer(folder)
    return folder


def config(model: Path, folder: Path, **data: Any) -> TrainConfig:
    rows = toy.write_jsonl(folder / "data.jsonl", toy.arithmetic(60))
    held_out = toy.write_jsonl(folder / "eval.jsonl", toy.arithmetic(40, seed=1))
    places = {"path": str(rows), "eval_path": str(held_out), "cache_dir": str(folder / "cache")}
    return TrainConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {**places, "seq_len": 64, **data},
            "method": {"kind": "full"},
            "train": {"global_batch_size": 4, "max_steps": 1, "learning_rate": 1e-30},
        }
    )


def prepared(folder: Path, asked: TrainConfig) -> list[dict[str, Any]]:
    """The events of the `prepare` task."""
    run = RunDir(folder)
    run.mark()
    run.write_config(asked)
    run.write_plan(make_plan(asked))
    with EventWriter(folder) as emit:
        prepare_task(folder, emit)
    return read_events(folder)


def eval_loss(folder: Path, asked: TrainConfig) -> float:
    prepared(folder, asked)
    events = train_here(RunDir(folder))
    return float([event for event in events if event["kind"] == "eval.done"][-1]["loss"])


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "opt", "mamba2"])
def test_the_loss_is_that_of_unpacked_documents(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path / "model", family)
    asked = config(model, tmp_path)
    packed = eval_loss(tmp_path / "packed", asked)
    padded = eval_loss(tmp_path / "padded", config(model, tmp_path, packing=False))
    assert packed == pytest.approx(padded, rel=1e-5)
    assert open_data(RunDir(tmp_path / "packed"))[0].packed == (family != "mamba2")


def test_a_run_says_that_it_does_not_pack(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "mamba2")
    events = prepared(tmp_path / "run", config(model, tmp_path))
    assert any(REASON in event.get("message", "") for event in events if event["kind"] == "warning")
    choice = next(event for event in events if event["kind"] == "choice")
    assert (choice["name"], choice["value"], choice["automatic"]) == ("data.packing", False, True)
    assert all(event["packing"] is False for event in events if event["kind"] == "data.ready")
    quiet = prepared(tmp_path / "other", config(model, tmp_path, packing=False))
    assert not [event for event in quiet if event["kind"] == "choice"]


def test_packed_data_of_another_time_is_refused(tmp_path: Path) -> None:
    asked = config(write_model(tmp_path / "model", "mamba2"), tmp_path)
    run = make_run(tmp_path / "run", asked, make_plan(asked))
    assert open_data(run)[0].packed
    with pytest.raises(UnsupportedModelError, match=REASON):
        train_here(run)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny = tiny_config(AutoConfig.for_model("bert"))
    tiny.save_pretrained(folder)
    toy.write_tokenizer(folder)
    asked = config(folder, tmp_path)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"init": "random"})})
    with pytest.raises(UnsupportedModelError, match="not causal"):
        prepared(tmp_path / "run", asked)


def test_what_was_chosen_for_rows_of_one_length_is_undone(tmp_path: Path) -> None:
    asked = config(tmp_path, tmp_path)
    plan = make_plan(asked).model_copy(update={"cuda_graph": True, "compile": True})
    told: list[Any] = []
    changed = for_padded_rows(asked, plan, lambda kind, /, **fields: told.append(fields["name"]))
    assert (changed.cuda_graph, changed.compile) == (False, False)
    assert told == ["train.cuda_graph", "train.compile"]
    by_hand = asked.model_copy(update={"train": asked.train.model_copy(update={"compile": "on"})})
    assert for_padded_rows(by_hand, plan, lambda kind, /, **fields: None).compile
