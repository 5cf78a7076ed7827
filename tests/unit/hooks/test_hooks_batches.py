from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BatchEncoding, Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from pantheraml import FastLanguageModel
from pantheraml.hooks import trl
from pantheraml.hooks.batches import TRAIN_BATCHES, Ahead
from pantheraml.models.read_ahead import on_host
from tests.toy import write_llama


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    trl.revert()


def test_as_many_are_read_as_were_taken_at_once() -> None:
    read: list[int] = []
    ahead = Ahead(read.append(n) or n for n in range(9))  # type: ignore[func-returns-value]
    assert [next(ahead), next(ahead)] == [0, 1]
    for _ in range(3):
        ahead.read()
    assert read == [0, 1, 2, 3]
    assert [next(ahead), next(ahead), next(ahead)] == [2, 3, 4]
    assert list(ahead) == [5, 6, 7, 8]
    ahead.read()
    assert not list(ahead)


def test_what_goes_wrong_is_told_to_who_asks() -> None:
    def batches() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("a bad row")

    ahead = Ahead(batches())
    next(ahead)
    ahead.read()
    assert next(ahead) == 2
    ahead.read()
    with pytest.raises(ValueError, match="a bad row"):
        next(ahead)


@pytest.mark.parametrize("kind", [dict, BatchEncoding])
def test_batches_are_sent_when_they_are_read_and_remembered(kind: type[Any]) -> None:
    here = {name: torch.tensor([[1, 2], [3, n]]) for n, name in enumerate(("input_ids", "labels", "attention_mask"))}
    ahead = Ahead(iter([kind(here), kind(here)]), torch.device("meta"))
    assert next(ahead)["labels"].is_meta
    ahead.read()
    batch = next(ahead)
    sent_again = send_to_device(batch, torch.device("meta"))  # as accelerate does it
    assert sent_again["labels"].is_meta
    assert sent_again["input_ids"].is_meta
    for name in ("labels", "attention_mask"):
        assert on_host(sent_again[name]).tolist() == here[name].tolist()
    assert type(batch["input_ids"]) is Tensor


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_model_is_told_which_batch_its_next_step_begins_with(accumulation: int) -> None:
    """As accelerate takes them, which keeps one back."""
    told: list[int] = []
    ahead = Ahead(iter(range(1, 9)), expect=told.append)
    kept_back, used = next(ahead), []
    for _ in range(3):
        for _ in range(accumulation):
            following = next(ahead)
            used.append(kept_back)
            kept_back = following
        ahead.read()
    assert told == used[accumulation::accumulation]


def test_what_was_announced_is_not_told_again() -> None:
    told: list[int] = []
    ahead = Ahead(iter(range(1, 5)), expect=told.append)
    ahead.announce()
    assert not told, "accelerate has taken none yet"
    for _ in range(3):
        next(ahead)
        ahead.read()
        ahead.announce()
    assert told == [1, 2, 3]
    next(ahead)
    ahead.read()
    assert told == [1, 2, 3]
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.announce()
    assert told == [1, 2, 3, 4]


def test_batches_of_another_make_are_sent_too() -> None:
    ahead = Ahead(iter([(torch.ones(1), "a"), (torch.ones(2), "b")]), torch.device("meta"))
    next(ahead)
    ahead.read()
    tensor, name = next(ahead)
    assert tensor.is_meta
    assert name == "b"


@pytest.mark.filterwarnings("ignore:.pin_memory:UserWarning")  # there is nothing to pin for on a CPU
@pytest.mark.parametrize("pinned", [True, False])
def test_only_the_loaders_own_memory_is_sent_from(pinned: bool, tmp_path: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(write_llama(tmp_path)), max_seq_length=16)
    batches = [{"labels": torch.tensor([n])} for n in range(3)]
    loader = SimpleNamespace(base_dataloader=DataLoader(batches, batch_size=None, pin_memory=pinned))  # type: ignore[arg-type]
    loader.device = torch.device("meta")
    trainer = type("Trainer", (), {})()
    trainer.model, trainer.args, trainer.callback_handler = (
        model,
        SimpleNamespace(n_gpu=1),
        SimpleNamespace(callbacks=[]),
    )
    TRAIN_BATCHES.make(lambda _: loader)(trainer)
    ahead = iter(loader.base_dataloader)
    next(ahead)
    model.meanwhile()
    assert next(ahead)["labels"].is_meta == pinned


@pytest.mark.filterwarnings("ignore:.pin_memory:UserWarning")
def test_streams_that_accelerate_hands_out_are_read_as_ever(tmp_path: Path) -> None:
    """Its loader for them has no device."""
    model, _ = FastLanguageModel.from_pretrained(str(write_llama(tmp_path / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    rows = [[n, n + 1, n + 2, n + 3] for n in range(3, 19)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows}).to_iterable_dataset()
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=3, report_to="none", use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    arguments.dataloader_pin_memory = True  # as it is where there is a GPU
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=default_data_collator)
    assert trainer.train().global_step == 3


def train(place: Path, order: list[Any], **changes: Any) -> Any:
    """Trains for an epoch; `order` gets the tokens of each batch as they are read, and "step" at each step."""
    model, tokenizer = FastLanguageModel.from_pretrained(str(write_llama(place / "model")), max_seq_length=16)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    data = Dataset.from_dict({"input_ids": [[n, n + 1, n + 2, n + 3] for n in range(3, 19)]})
    arguments = SFTConfig(
        output_dir=str(place / "out"), per_device_train_batch_size=2, num_train_epochs=1, report_to="none",
        save_strategy="no", use_cpu=True, bf16=False, logging_steps=1, seed=3, **changes,
    )  # fmt: skip
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
    collate, step = trainer.data_collator.torch_call, trainer.training_step

    def collated(examples: Any) -> Any:
        order.append([example["input_ids"][0] for example in examples])
        return collate(examples)

    def stepped(*args: Any, **named: Any) -> Any:
        result = step(*args, **named)
        order.append("step")
        return result

    trainer.data_collator.torch_call, trainer.training_step = collated, stepped
    trainer.train()
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_same_batches_and_losses_but_read_during_steps(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[Any] = []
    between: list[Any] = []
    first = train(tmp_path, ahead, gradient_accumulation_steps=accumulation)
    trl.revert()
    monkeypatch.setattr(trl, "_ALL", (trl.SFT_HEAD, trl.COLLATOR, trl.PACKING_ATTENTION))
    second = train(tmp_path, between, gradient_accumulation_steps=accumulation)
    assert [batch for batch in ahead if batch != "step"] == [batch for batch in between if batch != "step"]
    losses = [[entry.get("loss") for entry in run.state.log_history] for run in (first, second)]
    assert losses[0] == losses[1]
    # accelerate is one batch ahead already; the first step ends with one more
    assert ahead.index("step") == between.index("step") + 1
    assert len(ahead) == len(between)


def test_a_copy_reads_nothing(tmp_path: Path) -> None:
    trainer = train(tmp_path, [])
    model = trainer.model.get_base_model()
    assert model.meanwhile is not None
    assert copy.deepcopy(model).meanwhile is None
    assert pickle.loads(pickle.dumps(model.meanwhile)) is None
    del trainer
    gc.collect()
    assert model.meanwhile._ahead() is None  # nobody reads on
    model.meanwhile()
