"""Packing is for models that compute the same without it: what a run makes of the others, and the losses of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pantheraml.base.errors import UnsupportedModelError
from pantheraml.base.event_stream import EventWriter
from pantheraml.models.tiny_model import tiny_config
from pantheraml.parallel.process_group import open_world
from pantheraml.specs.parallel import ParallelDims
from pantheraml.specs.run_dir import RunDir
from pantheraml.specs.tasks import VerifyRequest
from pantheraml.specs.train import TrainConfig
from pantheraml.worker.prepare import prepare_task
from pantheraml.worker.train import open_data, plan_for_padded_rows
from pantheraml.worker.verify import compare_modes
from tests import toy
from tests.event_log import raw_events
from tests.harness import make_plan, make_run, silent, train_here

LENGTHS = {"original_max_position_embeddings", "max_position_embeddings", "n_positions"}
REASON = "computes different values for packed documents than for separate ones"


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """A small random model for the tokenizer of the toys."""
    small = tiny_config(AutoConfig.for_model(family, **changes), longest=64)
    small.vocab_size, small.initializer_range = 320, 0.2
    small.bos_token_id = small.eos_token_id = small.pad_token_id = 1
    for name in LENGTHS & changes.keys():  # tiny_config raises them beyond any row
        setattr(small, name, changes[name])
        if name in (getattr(small, "rope_parameters", None) or {}):
            small.rope_parameters[name] = changes[name]
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


def prepared(folder: Path, requested: TrainConfig) -> list[dict[str, Any]]:
    """The events of the `prepare` task."""
    run = RunDir(folder)
    run.mark()
    run.write_config(requested)
    run.write_plan(make_plan(requested))
    with EventWriter(folder) as emit:
        prepare_task(folder, emit)
    return raw_events(folder)


def eval_loss(folder: Path, requested: TrainConfig) -> float:
    prepared(folder, requested)
    events = train_here(RunDir(folder))
    return float([event for event in events if event["kind"] == "eval.done"][-1]["loss"])


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "opt", "mamba2"])
def test_the_loss_is_that_of_unpacked_documents(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path / "model", family)
    requested = config(model, tmp_path)
    packed = eval_loss(tmp_path / "packed", requested)
    padded = eval_loss(tmp_path / "padded", config(model, tmp_path, packing=False))
    assert packed == pytest.approx(padded, rel=1e-5)
    assert open_data(RunDir(tmp_path / "packed"))[0].packed == (family != "mamba2")


LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
SHORT: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "phi3": {"original_max_position_embeddings": 64, "rope_scaling": LONGROPE, "sliding_window": None},
    "llama": {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
}
"""Models with 64 positions, or with a RoPE that changes beyond them."""


@pytest.mark.parametrize("family", SHORT)
def test_rows_may_exceed_the_model_positions_if_no_document_does(tmp_path: Path, family: str) -> None:
    model = write_model(tmp_path / "model", family, **SHORT[family])
    losses = [eval_loss(tmp_path / str(rows), config(model, tmp_path, seq_len=rows)) for rows in (64, 256)]
    padded = eval_loss(tmp_path / "padded", config(model, tmp_path, seq_len=256, packing=False))
    assert losses == pytest.approx([padded, padded], rel=1e-5)
    assert open_data(RunDir(tmp_path / "64"))[0].packed
    assert open_data(RunDir(tmp_path / "256"))[0].packed == (family == "gpt2")


def test_rows_are_not_batched_if_rope_depends_on_the_longest(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "phi3", **{**SHORT["phi3"], "original_max_position_embeddings": 16})
    requested = config(model, tmp_path)
    loss = eval_loss(tmp_path / "run", requested)
    choices = {event["name"]: event["value"] for event in raw_events(tmp_path / "run") if event["kind"] == "choice"}
    assert choices == {"data.packing": False, "train.micro_batch_size": 1}
    one = requested.model_copy(update={"train": requested.train.model_copy(update={"global_batch_size": 1})})
    assert loss == pytest.approx(eval_loss(tmp_path / "one", one), rel=1e-5)
    by_hand = requested.model_copy(update={"train": requested.train.model_copy(update={"micro_batch_size": 4})})
    other = eval_loss(tmp_path / "other", by_hand)
    assert abs(other - loss) > 1e-4, "the case would show nothing"
    warnings = [event["message"] for event in raw_events(tmp_path / "other") if event["kind"] == "warning"]
    assert any("train.micro_batch_size=4" in message and "longrope" in message for message in warnings)


def test_verify_does_not_batch_such_rows_either(tmp_path: Path) -> None:
    """One process takes whole global batches, and a mode smaller ones: with other RoPE angles they would differ."""
    model = write_model(tmp_path / "model", "phi3", **{**SHORT["phi3"], "original_max_position_embeddings": 16})
    requested = config(model, tmp_path)
    prepared(tmp_path / "run", requested)
    request = VerifyRequest(run_dir=tmp_path / "run", modes={"ddp": ParallelDims()}, steps=2, explicit=True)
    plan = make_plan(requested, micro=2)
    with open_world(plan, timeout_seconds=60) as world:
        data = open_data(RunDir(tmp_path / "run"))[0]
        verdicts = compare_modes(request, requested, plan, world, data, silent)
    assert verdicts is not None
    assert [(mode.passed, mode.loss) for mode in verdicts.modes] == [(True, 0.0)]
    (note,) = [note for note in verdicts.notes if "one row in each micro-batch" in note]
    assert "longrope" in note


def test_notice_about_the_mask_only_if_packed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "opt")
    for packing in (True, False):
        folder = tmp_path / str(packing)
        eval_loss(folder, config(model, tmp_path, packing=packing))
        messages = [event["message"] for event in raw_events(folder) if event["kind"] == "notice"]
        assert any("separated by an attention mask" in message for message in messages) == packing


def test_packing_turned_off_is_reported(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "mamba2")
    events = prepared(tmp_path / "run", config(model, tmp_path))
    assert any(REASON in event.get("message", "") for event in events if event["kind"] == "warning")
    choice = next(event for event in events if event["kind"] == "choice")
    assert (choice["name"], choice["value"], choice["automatic"]) == ("data.packing", False, True)
    assert all(event["packing"] is False for event in events if event["kind"] == "data.ready")
    quiet = prepared(tmp_path / "other", config(model, tmp_path, packing=False))
    assert not [event for event in quiet if event["kind"] == "choice"]


def test_data_packed_earlier_is_refused(tmp_path: Path) -> None:
    requested = config(write_model(tmp_path / "model", "mamba2"), tmp_path)
    run = make_run(tmp_path / "run", requested, make_plan(requested))
    assert open_data(run)[0].packed
    with pytest.raises(UnsupportedModelError, match=REASON):
        train_here(run)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny = tiny_config(AutoConfig.for_model("bert"))
    tiny.save_pretrained(folder)
    toy.write_tokenizer(folder)
    requested = config(folder, tmp_path)
    requested = requested.model_copy(update={"model": requested.model.model_copy(update={"init": "random"})})
    with pytest.raises(UnsupportedModelError, match="not causal"):
        prepared(tmp_path / "run", requested)


def test_choices_for_packed_rows_are_undone_without_packing(tmp_path: Path) -> None:
    requested = config(tmp_path, tmp_path)
    plan = make_plan(requested).model_copy(update={"cuda_graph": True, "compile": True})
    messages: list[Any] = []
    changed = plan_for_padded_rows(requested, plan, lambda event: messages.append(event.model_dump()["name"]))
    assert (changed.cuda_graph, changed.compile) == (False, False)
    assert messages == ["train.cuda_graph", "train.compile"]
    by_hand = requested.model_copy(update={"train": requested.train.model_copy(update={"compile": "on"})})
    assert plan_for_padded_rows(by_hand, plan, lambda event: None).compile
